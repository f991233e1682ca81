#include "transports/seal.h"

#include <sys/random.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/sha256.h"
#include "core/warning.h"
#include "transports/openssl.h"

namespace pycomm {
namespace {

constexpr char kMark[] = "sealed:";
constexpr size_t kMarkBytes = sizeof kMark - 1;
constexpr size_t kProofBytes = 2 * sizeof(Digest);
constexpr char kSalt[] = "pycomm secret 1";
// What random characters cannot be guessed, whatever a guess costs.
constexpr size_t kLongEnough = 16;

}  // namespace

std::string hexadecimal(Span<const uint8_t> bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size; i++) {
    text += {"0123456789abcdef"[bytes.data[i] >> 4], "0123456789abcdef"[bytes.data[i] & 15]};
  }
  return text;
}

void fill_random(Span<uint8_t> out) {
  for (size_t done = 0; done < out.size;) {
    const ssize_t n = ::getrandom(out.data + done, out.size - done, 0);
    if (n < 0 && errno != EINTR) throw Error("the kernel gives no random bytes");
    done += n > 0 ? static_cast<size_t>(n) : 0;
  }
}

std::string random_secret() {
  uint8_t bytes[32];
  fill_random({bytes, sizeof bytes});
  return hexadecimal({bytes, sizeof bytes});
}

std::string key_of_secret(const std::string& secret) {
  if (secret.empty()) return "";
  if (secret.size() < kLongEnough) {  // before the lock: to log it, a thread waits for Python's
    warn_once("the secret has " + std::to_string(secret.size()) +
              " bytes, and who sees a proof of it can try all of that length; set PYCOMM_SECRET to "
              "16 random bytes or more, such as the output of: openssl rand -base64 24");
  }
  // Never destroyed: threads may need it while the process exits.
  static auto* const mutex = new std::mutex;
  static auto* const keys = new std::map<std::string, std::string>;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::string& key = (*keys)[secret];
  if (key.empty()) key = openssl::scrypt(secret, kSalt);
  return key;
}

std::string Seal::proof(const std::string& name, const std::string& value) const {
  std::string text("pycomm store\0", 13);
  for (const std::string& part : {group_, name}) text += std::to_string(part.size()) + ':' + part;
  const Digest proof = hmac_sha256(key_, text + value);
  return hexadecimal({proof.data(), proof.size()});
}

std::string Seal::close(const std::string& name, const std::string& value) const {
  return seals() ? kMark + proof(name, value) + ':' + value : value;
}

std::string Seal::open(const std::string& name, const std::string& text,
                       const std::string& what) const {
  const bool sealed = text.compare(0, kMarkBytes, kMark) == 0;
  if (!seals() && !sealed) return text;
  if (!seals()) {
    throw Error(what +
                " is sealed by a secret, and this rank was given none; set the same "
                "PYCOMM_SECRET on all ranks");
  }
  const size_t begin = kMarkBytes + kProofBytes + 1;
  if (!sealed || text.size() < begin || text[begin - 1] != ':') {
    throw Error(what +
                " has no proof of the secret: its rank was given none, has another version "
                "of pycomm, or somebody else writes to the store; set the same "
                "PYCOMM_SECRET on all ranks, and let nobody else reach the store");
  }
  std::string value = text.substr(begin);
  if (equal_proofs(proof(name, value), text.substr(kMarkBytes, kProofBytes))) return value;
  throw Error(what +
              " has a wrong proof of the secret: its rank was given another one, or somebody "
              "else writes to the store; set the same PYCOMM_SECRET on all ranks, and let "
              "nobody else reach the store");
}

void SealedStore::set(const std::string& key, const std::string& value) {
  store_->set(key, seal_.close(key, value));
}

std::optional<std::string> SealedStore::find(const std::string& key) {
  const auto text = store_->find(key);
  if (!text) return std::nullopt;
  return seal_.open(key, *text, "what the store has as \"" + key + "\"");
}

}  // namespace pycomm
