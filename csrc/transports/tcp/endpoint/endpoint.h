// Endpoint: where a process can be reached by those that want to form a group with it, before there
// is one. It outlives the groups. The first member of a new group lends the others its endpoint as
// their store; any endpoint answers whether its process takes part in a group.
//
// Callers prove the secret as on any connection of ranks (connect/handshake.h), before one of their
// bytes is parsed.
#pragma once
#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/fork_guard.h"
#include "transports/store.h"
#include "transports/tcp/endpoint/group_store.h"
#include "transports/tcp/endpoint/handle.h"
#include "transports/tcp/endpoint/message.h"

namespace pycomm::tcp {

class PYCOMM_API Endpoint {
 public:
  /// Listens, on the interfaces and ports that the options name. Throws Error if it cannot.
  Endpoint(const std::string& group, const GroupOptions& options);
  /// Listens at an address and port of this host that others know beforehand: see lend_store().
  Endpoint(const Address& at, const GroupOptions& options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const Handle& handle() const { return handle_; }
  /// Claims a uuid, which later questions are answered by. Throws Error "... already used" if it
  /// was claimed before.
  void claim(int64_t uuid, const Digest& list);
  /// Ends the claim: the group is formed, or has failed for this reason.
  void release(const std::string& failure);
  /// Returns the store of this group, for the process that lends it.
  std::shared_ptr<GroupStore> lend(const GroupRequest& request);

 private:
  struct Caller;

  void start();
  void run();
  void accept_all(const Fd& listener);
  void serve(Caller& caller);
  void read(Caller& caller);
  void write(Caller& caller);
  void obey(Caller& caller, const std::string& text);

  Handle handle_;
  std::string secret_;
  std::vector<Fd> listeners_;
  Fd wake_;
  GroupStores stores_;
  std::mutex mutex_;
  struct Claim {
    FormationState state;
    Digest list;
    std::string failure;
  };
  std::map<int64_t, Claim> claims_;  ///< by uuid, all of the endpoint's life
  std::optional<int64_t> current_;
  std::list<Caller> callers_;
  Deadline::Clock::time_point accept_backoff_until_{};
  const ForkGuard fork_{};
  std::atomic<bool> stop_{false};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace pycomm::tcp
