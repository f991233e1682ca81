// Frame headers that hold anything: what passes the check fits into its message. And the stream of
// a socket under any course of events: what it says to write is what was pushed, whatever is
// acknowledged, kept, or cut and resumed; and a connection that is made again goes on where its
// other end says only if that can be.
//
// Input: a header of 128 bytes, whose checksum is made right if the next byte is odd, and its
// version too if that is 1 modulo 4; then events.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>

#include "core/crc32c.h"
#include "tests/fuzz/target.h"
#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/stream.h"

namespace {

using pycomm::tcp::FrameHeader;
using pycomm::tcp::Resume;
using pycomm::tcp::SentStream;

void check_header(Reader& reader) {
  FrameHeader header;
  const auto bytes = reader.take(sizeof header);
  if (!bytes.empty()) std::memcpy(static_cast<void*>(&header), bytes.data(), bytes.size());
  const uint8_t how = reader.byte();
  if (how % 4 == 1) seal(header);
  if (how % 4 == 3) {
    header.checksum = pycomm::crc32c(
        {reinterpret_cast<const uint8_t*>(&header), offsetof(FrameHeader, checksum)});
  }
  if (!flaw_of(header, 0).empty()) return;
  require(header.lane == 0, "a header of another lane is refused");
  require(header.offset <= header.size && header.length <= header.size - header.offset,
          "a frame fits into its message");
  require(header.message > 0 || header.length == 0, "only a message has a payload");
  require(!describe(header.tag).empty(), "a tag can be told");
}

// The first word of a connection that is made again: of any bytes, or with a checksum that is
// right.
Resume resume_word(Reader& reader, uint64_t received) {
  Resume word;
  const uint8_t how = reader.byte();
  if (how % 4 == 0) {
    const auto bytes = reader.take(sizeof word);
    if (!bytes.empty()) std::memcpy(static_cast<void*>(&word), bytes.data(), bytes.size());
    if (how % 8 == 0) return word;
  } else {
    word.received = received;
  }
  seal(word);
  require(is_sound(word) == (word.magic == Resume::kMagic), "what was sealed is sound");
  return word;
}

struct Model {
  SentStream stream;
  std::string all;           // the whole stream, as pushed
  std::string all_payloads;  // of it, without headers
  size_t fresh = 0;          // of these, as far as the stream has told
  uint64_t position = 0, high = 0, acknowledged = 0;
  size_t frames = 0, released = 0;

  void push(const std::vector<uint8_t>& payload) {
    FrameHeader header;
    header.message = ++frames;
    header.size = header.length = static_cast<uint32_t>(payload.size());
    pycomm::tcp::seal(header);
    payloads.push_back(payload);
    stream.push(header, payloads.back().data());
    all.append(reinterpret_cast<const char*>(&header), sizeof header);
    all.append(payload.begin(), payload.end());
    all_payloads.append(payload.begin(), payload.end());
  }
  void write(size_t limit) {
    if (stream.all_written()) return;
    std::array<iovec, 2> parts;
    size_t count = 0;
    const size_t bytes = stream.next(parts, count, limit);
    size_t seen = 0;
    for (size_t p = 0; p < count; p++) {
      require(
          position + seen + parts[p].iov_len <= all.size() &&
              std::memcmp(parts[p].iov_base, all.data() + position + seen, parts[p].iov_len) == 0,
          "what is written is what was pushed");
      seen += parts[p].iov_len;
    }
    require(seen == bytes && bytes > 0 && bytes <= limit, "next() gives what it says");
    const auto payload = stream.wrote(bytes);
    require(payload.size <= all_payloads.size() - fresh, "only payload is told");
    require(std::equal(payload.begin(), payload.end(), all_payloads.begin() + fresh,
                       [](uint8_t a, char b) { return a == static_cast<uint8_t>(b); }),
            "what was not written before is told once, in order");
    fresh += payload.size;
    position += bytes;
    if (position > high) high = position;
  }
  auto release() {
    return [this](const FrameHeader& header) {
      require(header.message == ++released, "frames are released once, in order");
      // Their memory belongs to somebody else now.
      payloads[header.message - 1].assign(payloads[header.message - 1].size(), 0xdd);
    };
  }
  void acknowledge(uint64_t received) {
    require(stream.acknowledge(received, release()) == (received <= high),
            "nobody acknowledges what was not written");
    if (received <= high && received > acknowledged) acknowledged = received;
    if (position < acknowledged) position = acknowledged;
  }

  std::deque<std::vector<uint8_t>> payloads;
};

void run_stream(Reader& reader) {
  Model model;
  while (!reader.empty() && model.all.size() < 1 << 15) {
    const uint8_t event = reader.byte();
    switch (event % 6) {
      case 0: {
        const size_t size = event / 6 % 4 == 0 ? reader.word() % 6000 : reader.byte();
        if (!model.stream.all_written()) break;  // as the channel: a frame at a time
        std::vector<uint8_t> payload(size);
        for (size_t i = 0; i < size; i++) payload[i] = static_cast<uint8_t>(i * 31 + model.frames);
        model.push(payload);
        break;
      }
      case 1:
      case 2:
        model.write(1 + reader.word() % (event % 2 ? 100000 : 300));
        break;
      case 3:
        model.acknowledge(model.acknowledged + reader.word() % 2000);
        break;
      case 4:
        model.stream.keep(model.release());
        break;
      case 5: {
        const uint64_t place =
            model.acknowledged + reader.word() % (model.high - model.acknowledged + 2);
        const Resume word = resume_word(reader, place);
        if (!is_sound(word)) break;
        const uint64_t received = word.received;
        const bool may = model.stream.may_resume_at(received);
        require(may == (received >= model.acknowledged && received <= model.high),
                "a stream resumes where it has been");
        if (!may) break;
        model.acknowledge(received);
        model.stream.resume_at(received);
        model.position = received;
        break;
      }
    }
    require(model.stream.all_written() == (model.position == model.all.size()),
            "the stream knows its end");
    require(model.high < model.all.size() || model.fresh == model.all_payloads.size(),
            "all payload was told");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  check_header(reader);
  run_stream(reader);
  return 0;
}
