// Reports of a RateMeter whose connections always have bytes to send, one for each look: the
// milliseconds since the start (0: the meter did not look) and the rate.
#include <cstdio>
#include <thread>

#include "collectives/group/rate_meter.h"

int main() {
  using Clock = pycomm::RateMeter::Clock;
  pycomm::RateMeter meter;
  meter.begin();
  const Clock::time_point start = Clock::now();
  double told = 0;
  while (told == 0 && Clock::now() - start < std::chrono::seconds(30)) {
    double now = 0;
    meter.look([&] {
      now = std::chrono::duration<double>(Clock::now() - start).count();
      pycomm::LinkUse use;
      use.unsent = 1;
      use.bytes = static_cast<uint64_t>(1e6 * now);
      return use;
    });
    told = meter.report();
    std::printf("%.0f %.0f\n", 1e3 * now, told);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}
