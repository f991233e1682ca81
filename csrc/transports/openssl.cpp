// OpenSSL at run time: finds the library, and its functions by name.
#include "transports/openssl.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <vector>

#include "core/error.h"
#include "core/warning.h"

namespace pycomm::openssl {
namespace {

// Returns where to look: the library's name, which also finds the copy that Python's module `ssl`
// has loaded, else the system's; then the folder of a Python that brings its own libraries.
std::vector<std::string> places(const char* name) {
  std::vector<std::string> found = {name};
  char program[PATH_MAX];
  const ssize_t size = ::readlink("/proc/self/exe", program, sizeof program);
  if (size > 0) {
    std::string folder(program, static_cast<size_t>(size));
    folder.resize(folder.rfind('/') + 1);
    found.push_back(folder + "../lib/" + name);
  }
  return found;
}

[[noreturn]] void fail(const std::string& why) {
  throw Error("a secret and encryption need OpenSSL 3, and " + why +
              "; install it (Debian, Ubuntu: apt install libssl3; Fedora, RHEL: dnf install "
              "openssl-libs), or set on all ranks PYCOMM_TLS=off (a secret alone needs OpenSSL "
              "1.1), or no PYCOMM_SECRET either");
}

// The library stays loaded until the process ends.
Library load(const std::vector<std::string>& files) {
  void* handle = nullptr;
  std::string why;
  for (const std::string& file : files) {
    handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    why += (why.empty() ? "" : "; ") + std::string(::dlerror());
  }
  if (handle == nullptr) fail("it cannot be loaded: " + why);
  Library library;
  // This finds the functions of libcrypto as well, which libssl needs.
#define PYCOMM_OPENSSL_FIND(name, result, arguments)                            \
  library.name = reinterpret_cast<result(*) arguments>(::dlsym(handle, #name)); \
  if (library.name == nullptr) fail("the one that was found has no " #name);
  PYCOMM_OPENSSL_FUNCTIONS(PYCOMM_OPENSSL_FIND)
#undef PYCOMM_OPENSSL_FIND
  // Threads of ours may still use it while the process exits.
  if (library.OPENSSL_init_ssl(kNoAtExit, nullptr) != 1) fail("the one that was found is broken");
  return library;
}

}  // namespace

const Library& library() {
  static const Library library = load(places("libssl.so.3"));
  return library;
}

std::string version(const std::string& file) {
  return (file.empty() ? library() : load({file})).OpenSSL_version(0);
}

std::string scrypt(const std::string& secret, const std::string& salt) {
  constexpr uint64_t kRows = 16384, kBlocks = 8;  // N and r
  using Scrypt = int (*)(const char*, size_t, const unsigned char*, size_t, uint64_t, uint64_t,
                         uint64_t, uint64_t, unsigned char*, size_t);
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    for (const std::string& file : places(name)) {
      void* const handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays loaded
      if (handle == nullptr) continue;
      const auto function = reinterpret_cast<Scrypt>(::dlsym(handle, "EVP_PBE_scrypt"));
      std::string key(32, '\0');
      if (function != nullptr &&
          function(secret.data(), secret.size(),
                   reinterpret_cast<const unsigned char*>(salt.data()), salt.size(), kRows, kBlocks,
                   1, 0, reinterpret_cast<unsigned char*>(key.data()), key.size()) == 1) {
        return key;
      }
      // Neither another OpenSSL 3 nor connections without encryption would help.
      throw Error("a secret needs scrypt, which " + file +
                  " refuses, as in FIPS mode; set on all ranks no PYCOMM_SECRET, in a network that "
                  "strangers cannot reach, or start them all where OpenSSL is not in FIPS mode");
    }
  }
  fail("there is no libcrypto");
}

void warn_of_weakness(const GroupOptions& options) {
  if (!encrypts(options) || !options.secret.empty()) return;
  warn_once(
      "connections are encrypted, but no secret was given: their keys come from one that ranks "
      "share through the store, and who reads it there can stand between them; set the same "
      "PYCOMM_SECRET on all ranks");
}

}  // namespace pycomm::openssl

namespace pycomm {

bool encrypts(const GroupOptions& options) {
  if (options.tls != "auto" && options.tls != "on" && options.tls != "off") {
    throw Error("unknown tls \"" + options.tls + "\"; use one of auto, on, off");
  }
  return options.tls == "on" || (options.tls == "auto" && !options.secret.empty());
}

}  // namespace pycomm
