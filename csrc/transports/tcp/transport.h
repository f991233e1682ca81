// TCP transport: how ranks come by one.
#pragma once
#include <memory>
#include <vector>

#include "core/env.h"
#include "core/rank_state.h"
#include "transports/tcp/connect/peers.h"
#include "transports/transport.h"

namespace pycomm {

class PYCOMM_API TcpSetup {
 public:
  explicit TcpSetup(const GroupOptions& options);
  ~TcpSetup();

  /// Announces what make() publishes about this rank's host, with the exchange that begins a group,
  /// so that it needs none of its own. `may_span_hosts`: false if all ranks are known to be on one
  /// host.
  void announce(const Rendezvous& rendezvous, bool may_span_hosts) {
    exchange_.announce(rendezvous, may_span_hosts);
  }
  /// Returns the transport to the given ranks; each of them must be given our rank as well.
  /// `rank_state`: our own state, for peers that ask, or null.
  std::unique_ptr<Transport> make(const Rendezvous& rendezvous, const std::vector<int>& ranks,
                                  const SharedRankState* rank_state = nullptr);

 private:
  const GroupOptions options_;
  tcp::AddressExchange exchange_;
};

}  // namespace pycomm
