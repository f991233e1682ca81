// Mismatch error: the two ends of a channel expect different messages.
#pragma once
#include <string>

#include "core/error.h"
#include "core/op.h"

namespace pycomm {

struct MessageEnd {
  int rank;
  uint64_t bytes;
  const OpTag& tag;
};

inline WireMismatch mismatch(const MessageEnd& wanted, const MessageEnd& sent) {
  const auto text = [](const MessageEnd& end, const char* verb) {
    return "rank " + std::to_string(end.rank) + verb + std::to_string(end.bytes) + " bytes of " +
           describe_fully(end.tag);
  };
  return WireMismatch(text(wanted, " expects ") + ", " + text(sent, " sends "));
}

}  // namespace pycomm
