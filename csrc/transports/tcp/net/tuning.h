// What is set on a TCP connection in the kernel, and what the kernel says of it: its buffers, how
// much of them waits unsent, and its congestion control (PYCOMM_CONGESTION).
#pragma once
#include <chrono>
#include <string>

#include "core/op_timing.h"
#include "core/types.h"

namespace pycomm::tcp {

/// Must be called on both ends of a new connection that carries data.
///   - On a short path little is in flight, and the bytes that a send buffer holds beyond that have
///     left the processor's cache before they are read again: there the buffer stays small instead
///     of growing to megabytes.
///   - On a long path the receive window is opened at once, as far as the system lets it grow
///     (tcp_rmem). The kernel's own growth follows what the reader takes per round trip; meanwhile
///     the window limits the sender, and bbr takes that limit for the rate of the path. The send
///     buffer, which holds what is in flight, is as large as the system allows, and little of it
///     waits unsent, so that the sockets of a peer end together.
///   - Of several paths each gets a small part of a message at a time, so that the faster ones can
///     take the rest.
void choose_buffers(int fd, bool several_paths);

/// Sets how much may wait unsent on one of several paths: what it delivers in a few hundredths of a
/// second, as the kernel has measured it, but at least a frame. To be called every now and then.
void limit_unsent(int fd);

/// Returns the kernel's counters of a connection; zeros once it is broken.
LinkUse link_use(int fd);
/// Returns the round-trip time of a packet and its acknowledgement, as the kernel has measured it,
/// in whole milliseconds; 0 if it does not know.
std::chrono::milliseconds round_trip(int fd);
/// Returns the least of its samples, which holds the least of what a busy host adds; 0 likewise.
std::chrono::microseconds least_round_trip(int fd);

/// True if the kernel has repeated packets more than once without any answer: the path is cut, or
/// loses nearly all.
bool is_silent(int fd);

/// Throws Error unless `wanted` is "auto" or a congestion control that the kernel lets us use.
PYCOMM_API void check_congestion_control(const std::string& wanted);

/// True if choose_congestion_control() gives bbr to connections of a far peer.
bool gives_bbr(const std::string& wanted);

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
