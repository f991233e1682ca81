// Messages between a member and an endpoint: numbers and strings, little-endian, each message with
// its length before it.
//
//   Join      uuid, rank, size, list        no answer; the connection belongs to this group
//   Set       key, value                    no answer
//   Append    key, value                    no answer
//   Find      key                           Value (0 or 1, value) or Problem (text)
//   Present                                 Ranks (count, ranks here, count, ranks lost) or Problem
//   Formed                                  no answer; from now on the connection may end
//   Question  uuid                          Answer (state, list, text)
#pragma once
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/types.h"

namespace pycomm::tcp {

enum class MessageKind : uint8_t {
  join = 1,
  set,
  append,
  find,
  present,
  question,
  value,
  ranks,
  problem,
  answer,
  formed
};

/// What an endpoint knows of a uuid: its process does not know it, forms the group now, has
/// formed it, or has failed to, for a reason.
enum class FormationState : uint8_t { unknown, forms, formed, failed };

constexpr size_t kLargestMessage = size_t{16} << 20;

class MessageWriter {
 public:
  explicit MessageWriter(MessageKind kind) : text_(sizeof(uint32_t), '\0') {
    text_ += static_cast<char>(kind);
  }
  template <typename T>
  MessageWriter& number(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  MessageWriter& string(const std::string& value) {
    number(static_cast<uint32_t>(value.size()));
    text_ += value;
    return *this;
  }
  /// Returns the message with its length.
  std::string finished() const {
    std::string text = text_;
    const auto size = static_cast<uint32_t>(text.size() - sizeof(uint32_t));
    std::memcpy(text.data(), &size, sizeof size);
    return text;
  }

 private:
  std::string text_;
};

/// Reads a message; throws Error where it ends too early.
class MessageReader {
 public:
  explicit MessageReader(std::string text) : text_(std::move(text)) {}
  MessageKind kind() { return static_cast<MessageKind>(number<uint8_t>()); }
  template <typename T>
  T number() {
    T value;
    take(&value, sizeof value);
    return value;
  }
  std::string string() {
    const auto size = number<uint32_t>();
    if (size > text_.size() - at_) throw Error("endpoint: a message is cut short");
    std::string value = text_.substr(at_, size);
    at_ += size;
    return value;
  }

 private:
  void take(void* to, size_t bytes) {
    if (bytes > text_.size() - at_) throw Error("endpoint: a message is cut short");
    std::memcpy(to, text_.data() + at_, bytes);
    at_ += bytes;
  }
  const std::string text_;
  size_t at_ = 0;
};

/// Takes the first message, without its length, from what has arrived. Returns false if it is not
/// there as a whole. Throws Error if it is too large.
inline bool take_message(std::string& arrived, std::string& message) {
  uint32_t size = 0;
  if (arrived.size() < sizeof size) return false;
  std::memcpy(&size, arrived.data(), sizeof size);
  if (size > kLargestMessage) throw Error("endpoint: a message of " + std::to_string(size) + " B");
  if (arrived.size() - sizeof size < size) return false;
  message = arrived.substr(sizeof size, size);
  arrived.erase(0, sizeof size + size);
  return true;
}

}  // namespace pycomm::tcp
