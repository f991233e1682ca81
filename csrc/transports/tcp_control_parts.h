// What the files of Control share.
#pragma once
#include <chrono>
#include <cstddef>

#include "core/crc32c.h"
#include "transports/tcp_control.h"
#include "transports/transport.h"

namespace pycomm::tcp {

using Clock = std::chrono::steady_clock;

/// As it travels.
struct Control::Notice {
  static constexpr uint32_t kMagic = 0x4e435950;  // "PYCN"
  enum class Kind : uint32_t {
    abort = 1,
    goodbye = 2,
    connect = 3,
    ask = 4,
    standing = 5,
    heard = 6
  };

  explicit Notice(Kind kind = Kind::abort) : kind(kind) {}

  uint32_t magic = kMagic;
  Kind kind;
  uint32_t lane = 0;    // to be connected:
  int32_t socket = -1;  // this one again, or for the first time all of them
  uint32_t generation = 0;
  char text[1000] = {};  // why, zero-terminated; or the bytes of a Standing
  uint32_t checksum = 0;

  uint32_t compute() const {
    return crc32c({reinterpret_cast<const uint8_t*>(this), offsetof(Notice, checksum)});
  }
};

struct Control::Peer {
  int rank;
  Address address;
  Wire wire;
  uint32_t generation = 0;
  std::atomic<State> state{State::here};
  Clock::time_point cut_at{}, died_at{};  // its connection ended; nobody can be reached there
  Standing standing;                      // what it last said
  bool answered = false;                  // since we last asked
  bool heard = false;                     // our goodbye
  Notice in;
  size_t in_done = 0;
};

}  // namespace pycomm::tcp
