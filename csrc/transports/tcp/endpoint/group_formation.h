// Group formation: one member's attempt to form a group from handles. It finds the store that the
// first member lends, and asks the other members in turn what they do.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "transports/store.h"
#include "transports/tcp/endpoint/endpoint.h"
#include "transports/tcp/endpoint/handle.h"
#include "transports/tcp/tls/session.h"

namespace pycomm::tcp {

/// Nobody listens at the address: the process is gone, or a firewall refuses in its name.
class Refused : public Error {
 public:
  using Error::Error;
};

/// Nobody has proven at the address to be the process of the handle, or there is no way to it.
class Unproven : public Error {
 public:
  using Error::Error;
};

/// Connection of a member to another process's endpoint. One thread at a time.
class EndpointConnection {
 public:
  /// Connects and proves the secret: the handle's own, or else that of the key `given`, which all
  /// ranks have. Whoever refuses it or hangs up has proven nothing, and may be somebody on the
  /// path: it is asked again until the deadline. `interrupt` is called while it waits, and may
  /// throw. Throws Refused, Unproven, and Timeout.
  EndpointConnection(const Handle& to, const std::string& given, const Deadline& deadline,
                     std::function<void()> interrupt);

  /// Throw Error when the connection is gone, Timeout, and what `interrupt` throws. The next call
  /// goes on where such a one has stopped.
  void send(const std::string& message, const Deadline& deadline);
  std::string receive(const Deadline& deadline);
  /// How long the connection and the greeting took, by round trips.
  std::chrono::microseconds round_trip() const { return round_trip_; }

 private:
  void wait(int fd, short events, const Deadline& deadline) const;
  /// Tries each address in turn. Returns what somebody else has answered there; "": there is a
  /// connection.
  std::string call(const Handle& to, const std::string& secret, const Deadline& deadline);
  /// Returns why there is no connection; "": there is one.
  std::string greet(Fd fd, const Handle& to, const std::string& secret, const Deadline& deadline);

  const std::string where_;
  const std::function<void()> interrupt_;
  SecureSocket socket_;
  std::string arrived_, unsent_;
  std::chrono::microseconds round_trip_{0};
};

/// Whether the process of a handle has ended, as far as its machine can tell at once: its port is
/// refused. `secret`: that was given to all ranks, or empty.
PYCOMM_API bool is_gone(const Handle& handle, const std::string& secret,
                        std::function<void()> interrupt);

class RemoteStore;

/// Returns the store of ranks that know of each other only where rank 0 can be reached. Rank 0
/// lends it, at the endpoint of this handle, and the others call this, which waits for it. The
/// ranks of one store give it the same number. `interrupt` is called meanwhile. Throws Timeout, and
/// Error if something else answers there.
PYCOMM_API std::shared_ptr<Store> find_store(const Handle& there, int64_t number, int rank,
                                             const GroupOptions& options, Milliseconds timeout,
                                             std::function<void()> interrupt);

class PYCOMM_API GroupFormation {
 public:
  /// Checks the handles: ours is among them, once, and all are of groups of this name, with our
  /// secret and encryption. Throws Error. Claims the uuid.
  /// `secret`: as given to all ranks, or empty. `interrupt` is called while it waits.
  GroupFormation(Endpoint& endpoint, int64_t uuid, const std::vector<std::string>& handles,
                 const std::string& secret, Milliseconds timeout, std::function<void()> interrupt);
  GroupFormation(const GroupFormation&) = delete;
  GroupFormation& operator=(const GroupFormation&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(handles_.size()); }
  /// Returns the store. The other members need the connection to the first one's endpoint for it.
  /// Throws PeerLost if the first member is gone, and Timeout.
  std::shared_ptr<Store> store();
  /// Asks the next member what it does, if it is time to. Each member begins with the one after it,
  /// so all of them are asked by some member all the time, whether they have come or not. Throws
  /// PeerLost if a process is gone, WireMismatch if it forms a group of other handles by this uuid,
  /// Error if it has used the uuid, or has failed for another reason.
  void check_members();
  /// Must be called at the end, with the reason if the group could not be formed.
  void end(const std::string& failure = "");

 private:
  bool ask(int rank, bool again);
  [[noreturn]] void throw_gone(int rank, const Error& how) const;

  Endpoint& endpoint_;
  std::vector<Handle> handles_;
  const std::string key_;  ///< of the secret that was given
  const Deadline deadline_;
  const std::function<void()> interrupt_;
  const int64_t uuid_;
  const Digest list_;  ///< hash of the handles, in their order
  int rank_ = -1;
  std::shared_ptr<RemoteStore> remote_;  ///< null on rank 0
  Deadline next_check_;
  int asked_ = 0;          ///< the last one
  bool doubtful_ = false;  ///< it is to be asked again
};

}  // namespace pycomm::tcp
