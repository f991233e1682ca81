// Fd: an owner of a file descriptor that does not outlive its process in forked children.
#pragma once

namespace pycomm::tcp {

/// An owned file descriptor. In a forked child (a data loader's worker, say) it becomes a handle of
/// /dev/null: a child that held copies of our sockets would hide our death from the peers, and its
/// exit would send a close in our name.
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
