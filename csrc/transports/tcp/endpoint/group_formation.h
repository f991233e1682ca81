// Group formation: one member's attempt to form a group from handles. It finds the store that the
// first member lends, and asks members that do not come what they do.
#pragma once
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "transports/store.h"
#include "transports/tcp/endpoint/endpoint.h"

namespace pycomm::tcp {

class RemoteStore;

/// Returns the store of ranks that know of each other only where rank 0 can be reached; rank 0
/// calls the first, with an endpoint for this address, the others the second, which waits for it.
/// The ranks of one store give it the same number. `interrupt` is called meanwhile. The second
/// throws Timeout, and Error if something else answers there.
PYCOMM_API std::shared_ptr<Store> lend_store(Endpoint& endpoint, int64_t number, int size);
PYCOMM_API std::shared_ptr<Store> find_store(const std::vector<Address>& addresses, int64_t number,
                                             int rank, int size, const GroupOptions& options,
                                             Milliseconds timeout, std::function<void()> interrupt);

class PYCOMM_API GroupFormation {
 public:
  /// Checks the handles: ours is among them, once, and all are of groups of this name, with our
  /// secret and encryption. Throws Error. Claims the uuid.
  /// `secret`: as given to all ranks, or empty. `interrupt` is called while it waits.
  GroupFormation(Endpoint& endpoint, int64_t uuid, const std::vector<std::string>& handles,
                 const std::string& secret, Milliseconds timeout, std::function<void()> interrupt);
  GroupFormation(const GroupFormation&) = delete;
  GroupFormation& operator=(const GroupFormation&) = delete;

  int rank() const { return request_.rank; }
  int size() const { return request_.size; }
  /// Returns the store. The other members need the connection to the first one's endpoint for it.
  /// Throws PeerLost if the first member is gone, and Timeout.
  std::shared_ptr<Store> store();
  /// Asks a member that is missing, and those whose connections are lost, what they do, if it is
  /// time to. Throws PeerLost if a process is gone, WireMismatch if it forms a group of other
  /// handles by this uuid, Error if it has used the uuid, or has failed for another reason.
  void check_missing();
  /// Must be called at the end, with the reason if the group could not be formed.
  void end(const std::string& failure = "");

 private:
  void ask(int rank, bool lost);
  MemberStatus member_status();
  std::string name_of(int rank) const;
  [[noreturn]] void throw_gone(int rank, const Error& how) const;

  Endpoint& endpoint_;
  std::vector<Handle> handles_;
  const std::string key_;  ///< of the secret that was given
  const Deadline deadline_;
  const std::function<void()> interrupt_;
  GroupRequest request_;
  std::shared_ptr<GroupStore> lent_;  ///< of rank 0
  std::shared_ptr<RemoteStore> remote_;
  Deadline next_check_;
  int last_asked_ = 0;
  std::vector<int> refusals_;  ///< in a row, by rank
  std::set<int> gave_up_;      ///< ranks that are lost though their process is not
};

}  // namespace pycomm::tcp
