// One socket of a channel: what it is writing and reading, on one connection after the other. A
// part of tcp_channel*.cpp.
#pragma once
#include <array>
#include <string>

#include "transports/tcp_channel.h"
#include "transports/tcp_stream.h"

namespace pycomm::tcp {

// Headers are read together with what follows: a small message takes one system call.
constexpr size_t kStage = 2048;

struct TcpChannel::Socket {
  Wire wire;
  Readiness ready;
  int number = 0;
  uint32_t generation = 0;  // counts the connections, the first is 0
  std::string cut_by;       // what happened to the last one

  // On a later connection both ends first say how far they are.
  bool greeting = false;
  Resume theirs;
  size_t greeted = 0;

  SentStream out;
  // The message of a frame whose checksum goes with the next header, or 0; the message of the one
  // whose checksum is in the last header, until that is written.
  uint64_t unproven = 0, proving = 0;
  uint32_t out_crc = 0;
  uint64_t arrived = 0;       // bytes of the stream that comes in
  uint64_t acknowledged = 0;  // so much of it

  // The frame being read, once its header is here.
  bool reading = false;
  bool accepted = false;  // it is what its receive wants
  FrameHeader in;
  size_t in_done = 0;  // of its payload
  uint32_t in_crc = 0;
  // The frame before it, if its checksum is still to come.
  bool unproved = false;
  FrameHeader last;
  uint32_t last_crc = 0;
  size_t wake_bytes = 1;

  // Bytes that were read ahead: stage[begin, end).
  std::array<uint8_t, kStage> stage;
  size_t begin = 0, end = 0;

  size_t staged() const { return end - begin; }

  // Readable means from now on: so many bytes are there, or the end.
  void wake_at(size_t bytes) {
    // Of encrypted ones some may have left the kernel.
    if (wire.encrypted()) bytes = bytes > TlsSession::kAhead ? bytes - TlsSession::kAhead : 1;
    if (bytes == wake_bytes || !wire) return;
    wake_bytes = bytes;
    set_wake_bytes(wire.get(), bytes);
  }
};

}  // namespace pycomm::tcp
