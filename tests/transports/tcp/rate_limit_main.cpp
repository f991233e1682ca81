// A sender with a RateLimit on a path, window by window: prints what it offers, what the path
// delivers and the part of it that was repeated.
//
//     rate_limit RATE WANTED LOSS WINDOWS [RATE WANTED LOSS WINDOWS ...]
//
// RATE is what the path carries and WANTED what the sender would send without a limit, in bytes a
// second; LOSS is the probability with which the path loses each packet. A window takes 200 ms.
// With a RATE below 0 the connections are made anew first.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "transports/tcp/flow.h"

int main(int argc, char** argv) {
  constexpr double kWindow = 0.2, kPacket = 1448;
  std::mt19937_64 random(7);
  pycomm::tcp::RateLimit limit;
  double sent = 0, repeated = 0;
  for (int i = 1; i + 3 < argc; i += 4) {
    const double rate = std::abs(std::atof(argv[i])), wanted = std::atof(argv[i + 1]);
    const double loss = std::atof(argv[i + 2]);
    if (std::atof(argv[i]) < 0) sent = repeated = 0;
    for (int window = 0; window < std::atoi(argv[i + 3]); window++) {
      const double now = limit.bytes_per_second();
      const double offered = now > 0 ? std::min(now, wanted) : wanted;
      const int packets = static_cast<int>(offered * kWindow / kPacket);
      const double lost = std::binomial_distribution<int>(packets, loss)(random) * kPacket;
      const double delivered = std::min(offered - lost / kWindow, rate);
      const double again = offered - delivered;
      sent += offered * kWindow;
      repeated += again * kWindow;
      limit.update(delivered, static_cast<uint64_t>(sent), static_cast<uint64_t>(repeated));
      std::printf("%.0f %.0f %.4f\n", offered, delivered, again / offered);
    }
  }
}
