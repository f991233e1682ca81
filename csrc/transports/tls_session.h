// TLS 1.3 on one connection: what is sent is encrypted, and what arrives is what the other end has
// sent, or an error.
//
// There are no certificates. Both ends hold a key that comes from the group's secret and from the
// handshake that they have just made (tcp_handshake.h): an external pre-shared key, used with an
// ephemeral key exchange (psk_dhe_ke, RFC 8446, section 2.2), so that who learns the secret later
// cannot read what was recorded. The cipher is AES-128-GCM.
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <deque>
#include <string>
#include <vector>

#include "core/sha256.h"
#include "core/types.h"

namespace pycomm::tcp {

namespace openssl {
struct SSL;
}

/// One thread at a time. The socket does not block.
class TlsSession {
 public:
  enum class Progress : uint8_t { waits, failed, done };
  // Bytes that are read ahead of what is decrypted, at most.
  static constexpr size_t kAhead = 160 << 10;

  /// `fd` outlives it. Throws Error if there is no library for it.
  TlsSession(int fd, bool connects, const Digest& key);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  /// Moves the handshake on as far as it goes now. Nothing else may be sent before it is done.
  Progress shake_hands();
  /// While it waits: for room to send, not for bytes.
  bool sending() const { return sent_ < out_.size(); }
  /// Why it has failed.
  const std::string& problem() const { return problem_; }

  /// As sendmsg and recvmsg: bytes, 0 at the end, or -1 and errno, where EBADMSG is a record that
  /// was changed on its way. What is not counted as sent must be given again, before what follows.
  ssize_t send(const iovec* parts, size_t count);
  ssize_t receive(const iovec* parts, size_t count);

  // What OpenSSL asks of the network.
  int take_in(char* out, int room);
  int put_out(const char* data, int bytes);
  bool ended() const { return ended_; }
  const Digest& key() const { return key_; }

 private:
  struct Record {
    size_t plain;  // bytes of ours
    size_t end;    // in out_
  };

  bool flush();
  bool encrypt(const iovec* parts, size_t count, size_t skip);
  bool encrypt(const uint8_t* data, size_t bytes);
  void fail();

  const int fd_;
  const Digest key_;
  openssl::SSL* ssl_;
  bool established_ = false;
  bool ended_ = false;  // the other end says no more
  int error_ = 0;       // of the connection, for good
  std::string problem_;
  std::vector<uint8_t> in_;
  size_t in_begin_ = 0, in_end_ = 0;
  std::vector<uint8_t> out_;  // encrypted; the kernel has the first sent_ bytes
  size_t sent_ = 0;
  std::deque<Record> records_;  // in out_, and not yet counted as sent
  uint64_t encrypted_ = 0;      // records since the key was last changed
  std::vector<uint8_t> scratch_;
};

}  // namespace pycomm::tcp
