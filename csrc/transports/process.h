// Identity and liveness of processes that are not connected with us: a process publishes its name,
// and other processes of the machine can tell whether it still runs.
#pragma once
#include <sys/types.h>

#include <string>

namespace pycomm {

/// Returns the parent of a process of our PID namespace; 0 if it is not known.
pid_t parent_of(pid_t process);

/// By a signal or a debugger. Of a process of our PID namespace; false if it is not known.
bool is_stopped(pid_t process);

/// When this process began, in clock ticks since the start of the machine. 0 if /proc does not show
/// it.
uint64_t process_birth();

/// Returns a name that tells this machine from others, without blanks: its running kernel, and the
/// hostname or PYCOMM_HOST_ID, which tells machines that were cloned from one snapshot apart. Empty
/// if /proc is not mounted.
std::string machine_name();

/// Returns a name of this process that no other process will ever have; empty if /proc does not
/// show it.
std::string process_name();

/// Another process, identified by the name that it has published.
class Process {
 public:
  /// Looks up a published name. Nothing is ever known of a process that we cannot see, because it
  /// is on another machine or in another PID namespace, nor of our own.
  explicit Process(const std::string& name);
  /// Takes a process that is proven to be in our PID namespace. `birth`: field 22 of
  /// /proc/[pid]/stat, or empty if it is not known.
  Process(pid_t id, std::string birth);

  /// True if the process has ended in any way: we have seen it run, and it does not run any more.
  bool died() const { return seen_ && gone(); }
  /// True if there is no such process here. If it was never seen, it may be on another machine that
  /// seems to be this one.
  bool gone() const;
  /// True if the process has crashed and its memory is being written to a core file.
  bool dumps() const;
  pid_t id() const { return id_; }

 private:
  bool is_here() const;

  pid_t id_ = 0;  ///< 0: nothing is ever known
  bool seen_ = false;
  std::string birth_;
};

}  // namespace pycomm
