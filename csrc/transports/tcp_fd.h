// An owner of a file descriptor that does not outlive its process in forked children.
#pragma once

namespace pycomm::tcp {

/// Owns a file descriptor. In a forked child (a data loader's worker, say) it is a handle of
/// /dev/null: a child that held copies of our sockets would hide our death from the peers, and its
/// exit would say goodbye in our name.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

}  // namespace pycomm::tcp
