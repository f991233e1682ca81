// Buffers of TCP connections: how much the kernel holds for a connection at each end, and how much
// of that waits there unsent.
#pragma once
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
/// second, as the kernel has measured it. To be called every now and then.
void limit_unsent(int fd);

/// What the kernel says of a connection's sending side.
struct SocketUse {
  uint64_t delivered = 0;            ///< bytes that the peer's host has confirmed, since the start
  uint64_t unsent = 0;               ///< bytes that have not left yet
  uint64_t sent = 0;                 ///< bytes that have left, since the start; 0: an old kernel
  uint64_t repeated = 0;             ///< those of them that had left before
  uint32_t least_round_trip_us = 0;  ///< 0: not known
};
/// Adds a socket's counts to `sum`, and keeps the shortest round trip.
void add_use(int fd, SocketUse& sum);

/// Lets bbr send no more than so many bytes per second; 0: no limit. Other congestion controls are
/// left alone.
void limit_rate(int fd, double bytes_per_second);

/// True if the kernel has repeated packets more than once without any answer: the path is cut, or
/// loses nearly all.
bool is_silent(int fd);

}  // namespace pycomm::tcp
