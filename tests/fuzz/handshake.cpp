// Handshakes that hold anything. Nobody joins without the secret, and nobody joins by what was
// changed on its way.
//
// Input: which end is attacked, sizes of pieces, and the bytes that a stranger says. If the first
// byte is large, two ends that share a secret talk instead, and bytes between them are flipped.
#include <algorithm>
#include <cstring>

#include "tests/fuzz/target.h"
#include "transports/tcp/connect/handshake.h"

namespace {

using pycomm::tcp::Handshake;
using pycomm::tcp::Hello;
using State = Handshake::State;

Hello hello() {
  Hello hello;
  hello.size = 2;
  hello.rank = 1;
  hello.target = 0;
  hello.sockets = 1;
  return hello;
}

Handshake listener() { return Handshake("the secret", "group", 0, 2, 1, false); }
Handshake caller() { return Handshake("the secret", "group", hello()); }

void drain(Handshake& end) {
  while (end.to_send().size > 0) end.sent(end.to_send().size);
}

void attack(Handshake end, Reader& reader) {
  const size_t piece = 1 + reader.byte();
  drain(end);
  while (!reader.empty() && end.state() == State::running) {
    const auto wanted = end.wanted();
    const auto said = reader.take(std::min(piece, wanted.size));
    std::memcpy(wanted.data, said.data(), said.size());
    end.received(said.size());
    drain(end);
  }
  require(end.state() != State::done, "nobody joins without the secret");
}

// Moves what one end says to the other; true if it was changed, other than in the version of a
// reply, which is for people.
bool carry(Handshake& from, Handshake& to, Reader& reader) {
  bool changed = false;
  while (from.to_send().size > 0 && to.state() == State::running) {
    const auto wanted = to.wanted();
    const size_t bytes = std::min(wanted.size, from.to_send().size);
    std::memcpy(wanted.data, from.to_send().data, bytes);
    if (reader.byte() % 4 == 1) {
      const uint8_t flip = reader.byte();
      const size_t place = reader.byte() % bytes;
      const bool version = bytes == sizeof(uint64_t) + sizeof(pycomm::Digest) && place / 4 == 1;
      wanted.data[place] ^= flip;
      changed = changed || (flip != 0 && !version);
    }
    from.sent(bytes);
    to.received(bytes);
  }
  return changed;
}

void talk(Reader& reader) {
  Handshake calls = caller(), listens = listener();
  bool changed = false;
  for (int i = 0; i < 2; i++) {
    changed |= carry(calls, listens, reader);
    // The last word of the listener may still be changed: then only the caller refuses.
    if (listens.state() == State::done) {
      require(!changed, "what was changed on its way joins nobody");
    }
    changed |= carry(listens, calls, reader);
  }
  if (calls.state() == State::done) {
    require(listens.state() == State::done, "a caller joins only who has let it in");
  }
  if (!changed) require(calls.state() == State::done, "what arrives unchanged joins");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const uint8_t what = reader.byte();
  if (what >= 128) {
    talk(reader);
  } else if (what % 2 == 0) {
    attack(listener(), reader);
  } else {
    attack(caller(), reader);
  }
  return 0;
}
