// OpenSSL 3 functions that pycomm uses, found when the first group has a secret or encrypts: pycomm
// builds without OpenSSL's headers, and runs without its library where no group does. Names,
// prototypes and numbers are those of its manual (docs.openssl.org/3.0/man3).
#pragma once
#include <string>

#include "core/env.h"
#include "core/types.h"

namespace pycomm {

/// True if these options mean that connections are encrypted: `tls` is on, or it is auto and a
/// secret is given. Throws Error if it has another value.
PYCOMM_API bool encrypts(const GroupOptions& options);

}  // namespace pycomm

namespace pycomm::openssl {

// These types are opaque, as in the library itself.
struct SSL;
struct SSL_CTX;
struct SSL_METHOD;
struct BIO;
struct BIO_METHOD;

using PskClient = unsigned(SSL*, const char* hint, char* identity, unsigned identity_room,
                           unsigned char* psk, unsigned psk_room);
using PskServer = unsigned(SSL*, const char* identity, unsigned char* psk, unsigned psk_room);

constexpr long kTls13 = 0x0304;          // TLS1_3_VERSION
constexpr int kCtrlSessionCache = 44;    // SSL_CTRL_SET_SESS_CACHE_MODE
constexpr int kCtrlMinVersion = 123;     // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr int kCtrlMaxVersion = 124;     // SSL_CTRL_SET_MAX_PROTO_VERSION
constexpr int kErrorWantRead = 2;        // SSL_ERROR_WANT_READ
constexpr int kVerifyPeer = 1;           // SSL_VERIFY_PEER
constexpr int kKeyUpdate = 0;            // SSL_KEY_UPDATE_NOT_REQUESTED
constexpr uint64_t kNoAtExit = 0x80000;  // OPENSSL_INIT_NO_ATEXIT
constexpr int kBioSourceSink = 0x0400;   // BIO_TYPE_SOURCE_SINK
constexpr int kBioRetryRead = 0x09;      // BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY
constexpr int kBioFlush = 11;            // BIO_CTRL_FLUSH
constexpr int kBioEnd = 2;               // BIO_CTRL_EOF

#define PYCOMM_OPENSSL_FUNCTIONS(X)                                          \
  X(OpenSSL_version, const char*, (int))                                     \
  X(OPENSSL_init_ssl, int, (uint64_t, const void*))                          \
  X(ERR_clear_error, void, ())                                               \
  X(ERR_get_error, unsigned long, ())                                        \
  X(ERR_error_string_n, void, (unsigned long, char*, size_t))                \
  X(TLS_method, const SSL_METHOD*, ())                                       \
  X(SSL_CTX_new, SSL_CTX*, (const SSL_METHOD*))                              \
  X(SSL_CTX_ctrl, long, (SSL_CTX*, int, long, void*))                        \
  X(SSL_CTX_set_ciphersuites, int, (SSL_CTX*, const char*))                  \
  X(SSL_CTX_set_num_tickets, int, (SSL_CTX*, size_t))                        \
  X(SSL_new, SSL*, (SSL_CTX*))                                               \
  X(SSL_free, void, (SSL*))                                                  \
  X(SSL_set_ex_data, int, (SSL*, int, void*))                                \
  X(SSL_get_ex_data, void*, (const SSL*, int))                               \
  X(SSL_set_verify, void, (SSL*, int, int (*)(int, void*)))                  \
  X(SSL_set_psk_client_callback, void, (SSL*, PskClient*))                   \
  X(SSL_set_psk_server_callback, void, (SSL*, PskServer*))                   \
  X(SSL_set_connect_state, void, (SSL*))                                     \
  X(SSL_set_accept_state, void, (SSL*))                                      \
  X(SSL_set_bio, void, (SSL*, BIO*, BIO*))                                   \
  X(SSL_do_handshake, int, (SSL*))                                           \
  X(SSL_session_reused, int, (const SSL*))                                   \
  X(SSL_read, int, (SSL*, void*, int))                                       \
  X(SSL_write, int, (SSL*, const void*, int))                                \
  X(SSL_get_error, int, (const SSL*, int))                                   \
  X(SSL_key_update, int, (SSL*, int))                                        \
  X(BIO_meth_new, BIO_METHOD*, (int, const char*))                           \
  X(BIO_meth_set_write, int, (BIO_METHOD*, int (*)(BIO*, const char*, int))) \
  X(BIO_meth_set_read, int, (BIO_METHOD*, int (*)(BIO*, char*, int)))        \
  X(BIO_meth_set_ctrl, int, (BIO_METHOD*, long (*)(BIO*, int, long, void*))) \
  X(BIO_new, BIO*, (const BIO_METHOD*))                                      \
  X(BIO_set_data, void, (BIO*, void*))                                       \
  X(BIO_get_data, void*, (BIO*))                                             \
  X(BIO_set_init, void, (BIO*, int))                                         \
  X(BIO_set_flags, void, (BIO*, int))                                        \
  X(BIO_clear_flags, void, (BIO*, int))

struct Library {
#define PYCOMM_OPENSSL_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  PYCOMM_OPENSSL_FUNCTIONS(PYCOMM_OPENSSL_MEMBER)
#undef PYCOMM_OPENSSL_MEMBER
};

/// Returns the library of this process. Throws Error that says what to install.
const Library& library();

/// Warns, once, if connections are encrypted by keys that come from the store.
void warn_of_weakness(const GroupOptions& options);

/// Returns "OpenSSL 3.0.17 1 Jul 2025", of the file if one is named. Throws Error as library().
PYCOMM_API std::string version(const std::string& file = "");

/// Returns 32 bytes of scrypt (RFC 7914), by N = 16384, r = 8 and p = 1. It takes 50 ms and 16 MiB:
/// a key from a secret that people may have chosen, so slow that who tries secrets one after the
/// other gets nowhere. Throws Error as library().
std::string scrypt(const std::string& secret, const std::string& salt);

}  // namespace pycomm::openssl
