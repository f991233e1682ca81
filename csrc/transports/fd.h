// Fd: the owner of a file descriptor, and the texts of the kernel's errors.
#pragma once
#include <cerrno>
#include <string>

namespace pycomm {

/// An owned file descriptor. In a forked child (a data loader's worker, say) it becomes a handle of
/// /dev/null: a child that held copies of our sockets would hide our death from the peers, and its
/// exit would send a close in our name.
class Fd {
 public:
  /// Who has it: this process alone, or its forked children as well.
  enum class Scope : bool { process, children };

  Fd() = default;
  explicit Fd(int fd, Scope scope = Scope::process);
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();
  /// Gives it to the caller, and to children that are forked from then on.
  int release();

 private:
  int fd_ = -1;
};

/// Returns a descriptor that has none of the numbers of standard streams: in a process that has
/// closed its streams the kernel gives these to the next files, and whatever a library then prints
/// as a warning would be written to a socket or to shared memory. Takes one that the caller owns.
int beyond_streams(int fd);
/// True if the process, or its machine, has no free descriptor. That may pass.
inline bool lacks_descriptor(int error) { return error == EMFILE || error == ENFILE; }
/// Returns "Connection refused" and the like. Where no descriptor is free it says which limit is
/// reached, and what to do.
std::string error_text(int error);
/// Throws Error with the text of errno behind `what`.
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace pycomm
