// TLS session: OpenSSL between memory and a socket. It reads and writes through a BIO of ours,
// which moves many records by one system call, and never raises SIGPIPE. The kernel's TLS
// (SSL_OP_ENABLE_KTLS) would require OpenSSL's own BIO.
#include "transports/tcp/tls/session.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "transports/openssl.h"

namespace pycomm::tcp {
namespace {

using openssl::BIO;
using openssl::library;
using openssl::SSL;

constexpr size_t kRecord = 16 << 10;  // the most that a record holds
constexpr size_t kBatch = 128 << 10;  // encrypted before the kernel gets it
constexpr size_t kReadAhead = 128 << 10;
constexpr size_t kSmallBatch = 4 << 10, kSmallReadAhead = 4 << 10;
// AES-GCM is safe for 2^24.5 full records by one key (RFC 8446, section 5.5).
constexpr uint64_t kRecordsByKey = uint64_t{1} << 24;
constexpr const char* kCipher = "TLS_AES_128_GCM_SHA256";
constexpr const char* kIdentity = "pycomm";

static_assert(TlsSession::kAhead > kReadAhead + kRecord, "a record waits for its end, too");

TlsSession& session_of(BIO* bio) { return *static_cast<TlsSession*>(library().BIO_get_data(bio)); }

TlsSession& session_of(SSL* ssl) {
  return *static_cast<TlsSession*>(library().SSL_get_ex_data(ssl, 0));
}

long control_bio(BIO* bio, int what, long, void*) {
  if (what == openssl::kBioEnd) return session_of(bio).ended() ? 1 : 0;
  return what == openssl::kBioFlush ? 1 : 0;  // shake_hands() and send() flush
}

int read_bio(BIO* bio, char* out, int room) {
  library().BIO_clear_flags(bio, openssl::kBioRetryRead);
  const int n = session_of(bio).take_in(out, room);
  if (n < 0 && errno == EAGAIN) library().BIO_set_flags(bio, openssl::kBioRetryRead);
  return n;
}

int write_bio(BIO* bio, const char* data, int bytes) {
  return session_of(bio).put_out(data, bytes);
}

unsigned give_key(SSL* ssl, unsigned char* psk, unsigned room) {
  const Digest& key = session_of(ssl).key();
  if (room < key.size()) return 0;
  std::memcpy(psk, key.data(), key.size());
  return static_cast<unsigned>(key.size());
}

unsigned key_of_client(SSL* ssl, const char*, char* identity, unsigned identity_room,
                       unsigned char* psk, unsigned room) {
  if (identity_room <= std::strlen(kIdentity)) return 0;
  std::strcpy(identity, kIdentity);
  return give_key(ssl, psk, room);
}

unsigned key_of_server(SSL* ssl, const char* identity, unsigned char* psk, unsigned room) {
  return std::strcmp(identity, kIdentity) == 0 ? give_key(ssl, psk, room) : 0;
}

// The state that all sessions of the process share.
struct Shared {
  openssl::SSL_CTX* context;
  openssl::BIO_METHOD* method;

  Shared() : context(library().SSL_CTX_new(library().TLS_method())), method(nullptr) {
    const openssl::Library& lib = library();
    if (context == nullptr) throw Error("tls: OpenSSL cannot make a context");
    lib.SSL_CTX_ctrl(context, openssl::kCtrlMinVersion, openssl::kTls13, nullptr);
    lib.SSL_CTX_ctrl(context, openssl::kCtrlMaxVersion, openssl::kTls13, nullptr);
    lib.SSL_CTX_ctrl(context, openssl::kCtrlSessionCache, 0, nullptr);
    lib.SSL_CTX_set_num_tickets(context, 0);  // each connection has a key of its own
    if (lib.SSL_CTX_set_ciphersuites(context, kCipher) != 1) {
      throw Error(std::string("tls: OpenSSL does not offer ") + kCipher);
    }
    method = lib.BIO_meth_new(openssl::kBioSourceSink, "pycomm");
    if (method == nullptr) throw Error("tls: OpenSSL has no memory");
    lib.BIO_meth_set_read(method, read_bio);
    lib.BIO_meth_set_write(method, write_bio);
    lib.BIO_meth_set_ctrl(method, control_bio);
  }
};

}  // namespace

// All memory is allocated here, and not while data moves: callbacks of OpenSSL must not throw.
TlsSession::TlsSession(int fd, bool connects, const Digest& key, bool bulk)
    : fd_(fd),
      key_(key),
      batch_(bulk ? kBatch : kSmallBatch),
      in_(bulk ? kReadAhead : kSmallReadAhead) {
  static const Shared shared;
  const openssl::Library& lib = library();
  out_.reserve(batch_ + 2 * kRecord);
  scratch_.reserve(bulk ? kRecord : 0);  // for what comes in several parts
  ssl_ = lib.SSL_new(shared.context);
  BIO* bio = lib.BIO_new(shared.method);
  if (ssl_ == nullptr || bio == nullptr) throw Error("tls: OpenSSL has no memory");
  lib.BIO_set_data(bio, this);
  lib.BIO_set_init(bio, 1);
  lib.SSL_set_bio(ssl_, bio, bio);
  lib.SSL_set_ex_data(ssl_, 0, this);
  if (connects) {
    lib.SSL_set_psk_client_callback(ssl_, key_of_client);
    // No certificate is trusted: a peer that has one instead of the key does not get in.
    lib.SSL_set_verify(ssl_, openssl::kVerifyPeer, nullptr);
    lib.SSL_set_connect_state(ssl_);
  } else {
    lib.SSL_set_psk_server_callback(ssl_, key_of_server);
    lib.SSL_set_accept_state(ssl_);
  }
}

TlsSession::~TlsSession() { library().SSL_free(ssl_); }

// ------------------------------------------------------------------------------ the network

// During the handshake this reads exactly what is asked for, since later bytes may arrive before
// their reader.
int TlsSession::take_in(char* out, int room) {
  const auto wanted = static_cast<size_t>(room);
  if (in_begin_ == in_end_) {
    void* to = established_ ? static_cast<void*>(in_.data()) : out;
    ssize_t n;
    do n = ::recv(fd_, to, established_ ? in_.size() : wanted, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    ended_ = n == 0;
    if (n < 0 && errno != EAGAIN) error_ = errno;
    if (n <= 0 || !established_) return static_cast<int>(n);
    in_begin_ = 0;
    in_end_ = static_cast<size_t>(n);
  }
  const size_t bytes = std::min(wanted, in_end_ - in_begin_);
  std::memcpy(out, in_.data() + in_begin_, bytes);
  in_begin_ += bytes;
  return static_cast<int>(bytes);
}

int TlsSession::put_out(const char* data, int bytes) {
  out_.insert(out_.end(), data, data + bytes);
  return bytes;
}

// Returns true if the kernel has all of it.
bool TlsSession::flush() {
  while (sent_ < out_.size() && error_ == 0) {
    const ssize_t n =
        ::send(fd_, out_.data() + sent_, out_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) sent_ += static_cast<size_t>(n);
    if (n < 0 && errno == EAGAIN) return false;
    if (n < 0 && errno != EINTR) error_ = errno;
  }
  return error_ == 0;
}

// ------------------------------------------------------------------------------ the session

TlsSession::Progress TlsSession::shake_hands() {
  const openssl::Library& lib = library();
  lib.ERR_clear_error();
  const int result = lib.SSL_do_handshake(ssl_);
  const bool waits = result != 1 && lib.SSL_get_error(ssl_, result) == openssl::kErrorWantRead;
  if (result != 1 && !waits) fail();
  const bool flushed = flush();
  if (error_ != 0 || ended_) return Progress::failed;
  if (!flushed || waits) return Progress::waits;
  if (lib.SSL_session_reused(ssl_) != 1) {  // OpenSSL calls a session by our key resumed
    problem_ = "it has not used our key";
    return Progress::failed;
  }
  established_ = true;
  return Progress::done;
}

// Handles a failure of OpenSSL: because of the network, or because of bytes that came from there.
void TlsSession::fail() {
  const openssl::Library& lib = library();
  char text[256] = "it closed the connection";
  const unsigned long code = lib.ERR_get_error();
  if (code != 0) lib.ERR_error_string_n(code, text, sizeof text);
  problem_ = text;
  lib.ERR_clear_error();
  if (!ended_ && error_ == 0) error_ = EBADMSG;
}

ssize_t TlsSession::send(const iovec* parts, size_t count) {
  size_t total = 0;
  for (size_t i = 0; i < count; i++) total += parts[i].iov_len;
  size_t done = 0;
  for (;;) {
    const bool flushed = flush();
    // The other end can use whole records, and may answer at once.
    while (!records_.empty() && records_.front().end <= sent_ && done < total) {
      const size_t bytes = std::min(records_.front().plain, total - done);
      done += bytes;
      records_.front().plain -= bytes;
      if (records_.front().plain == 0) records_.pop_front();
    }
    if (!flushed || done == total) break;
    out_.clear();
    sent_ = 0;
    if (!encrypt(parts, count, done)) break;
  }
  if (done > 0) return static_cast<ssize_t>(done);
  errno = error_ != 0 ? error_ : EAGAIN;
  return -1;
}

// Encrypts the next batch, after `skip` bytes.
bool TlsSession::encrypt(const iovec* parts, size_t count, size_t skip) {
  for (size_t i = 0; i < count && out_.size() < batch_;) {
    if (skip >= parts[i].iov_len) {
      skip -= parts[i++].iov_len;
      continue;
    }
    const auto* data = static_cast<const uint8_t*>(parts[i].iov_base) + skip;
    size_t bytes = std::min(parts[i].iov_len - skip, kRecord);
    skip += bytes;
    // A header and the bytes after it make one record.
    if (bytes < kRecord && i + 1 < count) {
      scratch_.assign(data, data + bytes);
      skip = std::min(parts[++i].iov_len, kRecord - bytes);
      const auto* rest = static_cast<const uint8_t*>(parts[i].iov_base);
      scratch_.insert(scratch_.end(), rest, rest + skip);
      data = scratch_.data();
      bytes += skip;
    }
    if (!encrypt(data, bytes)) return false;
  }
  return true;
}

bool TlsSession::encrypt(const uint8_t* data, size_t bytes) {
  const openssl::Library& lib = library();
  lib.ERR_clear_error();
  if (++encrypted_ == kRecordsByKey) {
    encrypted_ = 0;
    lib.SSL_key_update(ssl_, openssl::kKeyUpdate);
  }
  if (lib.SSL_write(ssl_, data, static_cast<int>(bytes)) != static_cast<int>(bytes)) {
    fail();
    return false;
  }
  records_.push_back({bytes, out_.size()});
  return true;
}

ssize_t TlsSession::receive(const iovec* parts, size_t count) {
  const openssl::Library& lib = library();
  ssize_t done = 0;
  for (size_t i = 0; i < count && error_ == 0 && !ended_; i++) {
    auto* to = static_cast<uint8_t*>(parts[i].iov_base);
    for (size_t left = parts[i].iov_len; left > 0;) {
      lib.ERR_clear_error();
      const int n = lib.SSL_read(ssl_, to, static_cast<int>(left));
      if (n > 0) {
        to += n;
        left -= static_cast<size_t>(n);
        done += n;
        continue;
      }
      if (lib.SSL_get_error(ssl_, n) == openssl::kErrorWantRead) {
        if (done == 0) errno = EAGAIN;
        return done > 0 ? done : -1;
      }
      fail();
      break;
    }
  }
  if (done > 0 || error_ == 0) return done;
  errno = error_;
  return -1;
}

}  // namespace pycomm::tcp
