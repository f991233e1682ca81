// Text of handles.
#include "transports/tcp/endpoint/handle.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "core/error.h"
#include "core/sha256.h"
#include "transports/openssl.h"
#include "transports/seal.h"

namespace pycomm::tcp {
namespace {

constexpr const char *kFamily = "pycomm-handle-", *kVersion = "pycomm-handle-2";
constexpr const char* kNone = "-";
constexpr size_t kHashDigits = 16;

std::string digits(const Digest& digest) {
  return hexadecimal({digest.data(), digest.size()}).substr(0, kHashDigits);
}

std::string or_none(const std::string& text) { return text.empty() ? kNone : text; }

}  // namespace

std::string hash_of_group(const std::string& name) { return digits(sha256("group " + name)); }

std::string proof_of_secret(const std::string& key, const std::string& id) {
  return digits(hmac_sha256(key, "pycomm handle " + id));
}

Handle known_handle(const std::vector<Address>& addresses, const GroupOptions& options) {
  Handle handle;
  handle.id = "store";
  handle.tls = encrypts(options);
  // As any store, it is open to whoever reaches it, unless a secret was given.
  if (options.secret.empty()) handle.secret = "pycomm store";
  handle.addresses = addresses;
  return handle;
}

std::string Handle::text() const {
  std::string text = std::string(kVersion) + " " + group + " " + id + (tls ? " tls " : " plain ") +
                     or_none(tag) + " " + or_none(secret) + " ";
  return text + list_text(addresses);
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
  if (version != kVersion && version.compare(0, std::strlen(kFamily), kFamily) == 0) {
    throw wrong("it begins with \"" + version + "\" where this version of pycomm writes \"" +
                kVersion + "\"; install the same pycomm on all hosts");
  }
  if (version != kVersion) throw wrong("it does not begin with \"" + std::string(kVersion) + "\"");
  if (words.fail() || (words >> more)) throw wrong("it does not have seven words");
  if (encryption != "tls" && encryption != "plain") throw wrong("it says \"" + encryption + "\"");
  handle.tls = encryption == "tls";
  if (handle.tag == kNone) handle.tag.clear();
  if (handle.secret == kNone) handle.secret.clear();
  handle.addresses = Address::parse_list(list);
  const bool all_listen = std::all_of(handle.addresses.begin(), handle.addresses.end(),
                                      [](const Address& address) { return address.port() != 0; });
  if (handle.addresses.empty() || !all_listen) throw wrong("it has the addresses \"" + list + "\"");
  if (handle.tag.empty() == handle.secret.empty()) throw wrong("it has no secret, or two");
  return handle;
}

}  // namespace pycomm::tcp
