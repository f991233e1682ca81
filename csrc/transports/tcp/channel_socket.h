// One socket of a channel: its outgoing stream and incoming frames, over consecutive connections.
// Part of channel*.cpp.
#pragma once
#include <array>
#include <string>

#include "transports/tcp/channel.h"
#include "transports/tcp/stream.h"

namespace pycomm::tcp {

// Headers are read together with the bytes after them: a small message takes one system call.
constexpr size_t kStage = 2048;

struct TcpChannel::Socket {
  SecureSocket sock;
  Readiness ready;
  int number = 0;
  uint32_t generation = 0;  // counts the connections from 0
  std::string cut_by;       // why the last one ended
  double limit = 0;         // bytes per second of this one; 0: none

  // On a later connection both ends first send a Resume.
  bool greeting = false;
  Resume theirs;
  size_t greeted = 0;

  SentStream out;
  // `unproven` is the message of a frame whose checksum goes with the next header, or 0; `proving`
  // is the message of the frame whose checksum is in the last header, until that is written.
  uint64_t unproven = 0, proving = 0;
  uint32_t out_crc = 0;
  uint64_t arrived = 0;       // bytes of the incoming stream
  uint64_t acknowledged = 0;  // of these, the bytes that we have acknowledged

  // The frame being read, once its header has arrived.
  bool reading = false;
  bool accepted = false;  // it matches its receive
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

  // Makes the socket readable only once this many bytes are there, or the end.
  void wake_at(size_t bytes) {
    // Some bytes of an encrypted connection may have left the kernel already.
    if (sock.encrypted()) bytes = bytes > TlsSession::kAhead ? bytes - TlsSession::kAhead : 1;
    if (bytes == wake_bytes || !sock) return;
    wake_bytes = bytes;
    set_wake_bytes(sock.get(), bytes);
  }
};

}  // namespace pycomm::tcp
