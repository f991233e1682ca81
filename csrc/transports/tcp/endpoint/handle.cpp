// Text of handles.
#include "transports/tcp/endpoint/handle.h"

#include <sstream>

#include "core/error.h"
#include "core/sha256.h"

namespace pycomm::tcp {
namespace {

constexpr const char* kVersion = "pycomm-handle-1";
constexpr const char* kNone = "-";
constexpr size_t kHashDigits = 16;

std::string digits(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  }
  return text.substr(0, kHashDigits);
}

std::string or_none(const std::string& text) { return text.empty() ? kNone : text; }

}  // namespace

std::string hash_of_group(const std::string& name) { return digits(sha256("group " + name)); }

std::string hash_of_secret(const std::string& secret) {
  return secret.empty() ? "" : digits(hmac_sha256(secret, "pycomm handle"));
}

std::string Handle::text() const {
  std::string text = std::string(kVersion) + " " + group + " " + id + (tls ? " tls " : " plain ") +
                     or_none(tag) + " " + or_none(secret) + " ";
  for (size_t i = 0; i < addresses.size(); i++) text += (i > 0 ? "," : "") + addresses[i].text();
  return text;
}

Handle Handle::parse(const std::string& text) {
  std::istringstream words(text);
  std::string version, encryption, list, more;
  Handle handle;
  words >> version >> handle.group >> handle.id >> encryption >> handle.tag >> handle.secret >>
      list;
  const auto wrong = [&](const std::string& why) {
    return Error("\"" + text.substr(0, 40) + (text.size() > 40 ? "..." : "") +
                 "\" is no handle of a pycomm group: " + why +
                 "; pass what get_reconfigure_handle() of each rank returns");
  };
  if (version != kVersion) throw wrong("it does not begin with \"" + std::string(kVersion) + "\"");
  if (words.fail() || (words >> more)) throw wrong("it does not have seven words");
  if (encryption != "tls" && encryption != "plain") throw wrong("it says \"" + encryption + "\"");
  handle.tls = encryption == "tls";
  if (handle.tag == kNone) handle.tag.clear();
  if (handle.secret == kNone) handle.secret.clear();
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    handle.addresses.emplace_back();
    if (!Address::parse(list.substr(begin, end - begin), handle.addresses.back()) ||
        handle.addresses.back().port() == 0) {
      throw wrong("it has the address \"" + list.substr(begin, end - begin) + "\"");
    }
    begin = end + 1;
  }
  if (handle.tag.empty() == handle.secret.empty()) throw wrong("it has no secret, or two");
  return handle;
}

}  // namespace pycomm::tcp
