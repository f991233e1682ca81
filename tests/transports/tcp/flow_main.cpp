// A Flow that is told what its sockets do: prints after each look what they may send together, in
// bytes a second, and how many of four are in use. Lines of the input, with times in milliseconds:
//
//     begin TIME
//     look TIME ROUND_TRIP DELIVERED UNSENT SENT REPEATED
#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>

#include "transports/tcp/flow.h"

int main() {
  using pycomm::tcp::Flow;
  constexpr size_t kSockets = 4;
  Flow flow;
  std::string what;
  for (int64_t ms; std::cin >> what >> ms;) {
    const Flow::Clock::time_point now{std::chrono::milliseconds(ms)};
    if (what == "begin") {
      flow.begin(now);
      continue;
    }
    pycomm::tcp::SocketUse use;
    std::cin >> use.least_round_trip_us >> use.delivered >> use.unsent >> use.sent >> use.repeated;
    use.least_round_trip_us *= 1000;
    if (flow.is_due(now)) flow.update(now, use);
    const double limit = flow.limit(kSockets) * static_cast<double>(flow.sockets(kSockets));
    std::printf("%.0f %zu\n", limit, flow.sockets(kSockets));
  }
}
