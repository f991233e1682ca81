// Where OpenSSL is, and its functions by name.
#include "transports/tls_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <vector>

#include "core/error.h"

namespace pycomm::tcp::openssl {
namespace {

constexpr const char* kName = "libssl.so.3";

// By its name, which finds the copy that Python's module `ssl` has loaded, too, else the system's;
// then where a Python that brings its own libraries keeps them.
std::vector<std::string> places() {
  std::vector<std::string> found = {kName};
  char program[PATH_MAX];
  const ssize_t size = ::readlink("/proc/self/exe", program, sizeof program);
  if (size > 0) {
    std::string folder(program, static_cast<size_t>(size));
    folder.resize(folder.rfind('/') + 1);
    found.push_back(folder + "../lib/" + kName);
  }
  return found;
}

[[noreturn]] void fail(const std::string& why) {
  throw Error("tls: encryption needs OpenSSL 3, and " + why +
              "; install it (Debian, Ubuntu: apt install libssl3; Fedora, RHEL: dnf install "
              "openssl-libs) or set PYCOMM_TLS=off on all ranks");
}

// It stays loaded until the process ends.
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
  // Those of libcrypto as well: it is what libssl needs.
#define PYCOMM_OPENSSL_FIND(name, result, arguments)                            \
  library.name = reinterpret_cast<result(*) arguments>(::dlsym(handle, #name)); \
  if (library.name == nullptr) fail("the one that was found has no " #name);
  PYCOMM_OPENSSL_FUNCTIONS(PYCOMM_OPENSSL_FIND)
#undef PYCOMM_OPENSSL_FIND
  // Threads of ours may still talk while the process exits.
  if (library.OPENSSL_init_ssl(kNoAtExit, nullptr) != 1) fail("the one that was found is broken");
  return library;
}

}  // namespace

const Library& library() {
  static const Library library = load(places());
  return library;
}

std::string version(const std::string& file) {
  return (file.empty() ? library() : load({file})).OpenSSL_version(0);
}

}  // namespace pycomm::tcp::openssl
