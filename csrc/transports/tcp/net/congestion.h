// Congestion control of TCP connections: which one a connection gets (PYCOMM_CONGESTION).
#pragma once
#include <string>

#include "core/types.h"

namespace pycomm::tcp {

/// Throws Error unless `wanted` is "auto" or a congestion control that the kernel lets us use.
PYCOMM_API void check_congestion_control(const std::string& wanted);

/// Gives a new connection the congestion control `wanted`; each end does so for what it sends.
/// "auto":
///   - reno between ends with one address. There is no network to be fair to, and controls that
///     pace (bbr) halve the bandwidth there;
///   - bbr from a round trip of 1 ms on. It keeps its rate where packets are lost at random, and
///     after a pause, when others begin with ten packets again (tcp_slow_start_after_idle): then
///     each step of a training would begin slowly;
///   - else the system's. On a short way others recover from a loss within a millisecond.
/// A control that the kernel refuses is left out: the connection keeps the system's.
void choose_congestion_control(int fd, const std::string& wanted);

/// Returns the congestion control of a connection: "bbr" and the like.
std::string congestion_control(int fd);

}  // namespace pycomm::tcp
