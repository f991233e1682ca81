#include "core/notice.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace pycomm {
namespace {

/// The part of an encoded notice that has a fixed size. Little-endian, without padding.
struct Head {
  uint8_t kind = 0;
  uint8_t zero = 0;
  uint16_t ranks = 0;
  int32_t from = -1;
  int32_t rank = -1;
  uint32_t text = 0;
};
static_assert(sizeof(Head) == 16, "a notice travels without padding");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wire formats are little-endian");
static_assert(sizeof(int) == sizeof(int32_t), "ranks travel as they are");

/// Returns the bytes of `text` that fit into `room`, without a part of a character of UTF-8.
size_t fitting(const std::string& text, size_t room) {
  if (text.size() <= room) return text.size();
  const auto continues = [&](size_t at) { return (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80; };
  size_t end = room;
  while (end > 0 && continues(end)) end--;
  return end;
}

/// Returns `ranks` of a notice, and `rank`, which may be among those that an encoded one left out.
std::vector<int> all_lost(const Notice& notice) {
  std::vector<int> ranks = notice.ranks;
  const auto place = std::lower_bound(ranks.begin(), ranks.end(), notice.rank);
  if (place == ranks.end() || *place != notice.rank) ranks.insert(place, notice.rank);
  return ranks;
}

Notice unreadable() {
  Notice notice;
  notice.text = "its reason cannot be read; look at its own log";
  return notice;
}

}  // namespace

size_t Notice::encode(uint8_t* out, size_t room) const noexcept {
  Head head;
  head.kind = static_cast<uint8_t>(kind);
  head.ranks = static_cast<uint16_t>(std::min(ranks.size(), kMaxRanks));
  head.from = from;
  head.rank = rank;
  const size_t fixed = sizeof head + head.ranks * sizeof(int32_t);
  const size_t length = fitting(text, room - fixed);
  head.text = static_cast<uint32_t>(length);
  std::memcpy(out, &head, sizeof head);
  if (head.ranks > 0) std::memcpy(out + sizeof head, ranks.data(), head.ranks * sizeof(int32_t));
  if (length > 0) std::memcpy(out + fixed, text.data(), length);
  return fixed + length;
}

std::string Notice::encoded() const {
  std::string bytes(sizeof(Head) + kMaxRanks * sizeof(int32_t) + text.size(), '\0');
  bytes.resize(encode(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()));
  return bytes;
}

Notice Notice::decode(Span<const uint8_t> bytes) {
  Head head;
  if (bytes.size < sizeof head) return unreadable();
  std::memcpy(&head, bytes.data, sizeof head);
  const size_t fixed = sizeof head + head.ranks * sizeof(int32_t);
  if (head.kind > static_cast<uint8_t>(Kind::lost) || head.ranks > kMaxRanks ||
      fixed > bytes.size || head.text > bytes.size - fixed) {
    return unreadable();
  }
  Notice notice;
  notice.kind = static_cast<Kind>(head.kind);
  notice.from = head.from;
  notice.rank = head.rank;
  notice.ranks.resize(head.ranks);
  if (head.ranks > 0) {
    std::memcpy(notice.ranks.data(), bytes.data + sizeof head, head.ranks * sizeof(int32_t));
  }
  notice.text.assign(reinterpret_cast<const char*>(bytes.data) + fixed, head.text);
  return notice;
}

Aborted::Aborted(Notice notice, const std::string& did)
    : Error((notice.from < 0 ? "a rank" : "rank " + std::to_string(notice.from)) + " " + did +
            ": " + notice.text),
      notice(std::move(notice)) {}

Notice plain_notice(const std::string& text, int from) noexcept {
  Notice notice;
  notice.from = from;
  try {
    notice.text = text;
  } catch (const std::bad_alloc&) {
    notice.text = "out of memory";  // short enough to need none
  }
  return notice;
}

Notice to_notice(const std::exception_ptr& error, int from) {
  Notice notice;
  notice.from = from;
  try {
    std::rethrow_exception(error);
  } catch (const Aborted& e) {
    return e.notice;
  } catch (const Timeout& e) {
    notice.kind = Notice::Kind::timeout;
    notice.ranks = e.waited_for;
    notice.text = e.what();
  } catch (const WireMismatch& e) {
    notice.kind = Notice::Kind::mismatch;
    notice.text = e.what();
  } catch (const PeerLost& e) {
    notice.kind = Notice::Kind::lost;
    notice.rank = e.rank;
    notice.ranks = e.ranks;
    notice.text = e.what();
  } catch (const std::exception& e) {
    notice.text = e.what();
  } catch (...) {
    notice.text = "unknown error";
  }
  return notice;
}

std::exception_ptr error_of(const Notice& notice) {
  switch (notice.kind) {
    case Notice::Kind::timeout:
      return std::make_exception_ptr(Timeout(notice.text, notice.ranks));
    case Notice::Kind::mismatch:
      return std::make_exception_ptr(WireMismatch(notice.text));
    case Notice::Kind::lost:
      return std::make_exception_ptr(PeerLost(notice.rank, notice.text, all_lost(notice)));
    case Notice::Kind::error:
      break;
  }
  return std::make_exception_ptr(Error(notice.text));
}

void throw_error(const Notice& notice) { std::rethrow_exception(error_of(notice)); }

Notice lost(int rank, const std::string& how, const std::string& where) {
  Notice notice;
  notice.kind = Notice::Kind::lost;
  notice.rank = rank;
  notice.text =
      "rank " + std::to_string(rank) + (where.empty() ? "" : " (" + where + ")") + " " + how;
  return notice;
}

std::exception_ptr from_notice(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Aborted& e) {
    return e.notice.kind == Notice::Kind::error ? error : error_of(e.notice);
  } catch (...) {
    return error;
  }
}

}  // namespace pycomm
