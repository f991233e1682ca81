// Network interfaces of a host, and the choice of those that a group uses.
#pragma once
#include <string>
#include <vector>

#include "transports/tcp/net/socket.h"

namespace pycomm::tcp {

struct Interface {
  std::string name;  ///< "eth0"
  Address address;   ///< one that other hosts can reach, except on the loopback interface
};

/// Returns the interfaces that are up, one entry for each address that can be published; IPv4
/// first.
PYCOMM_API std::vector<Interface> interfaces();

/// Returns the CPUs on which this process may run: a '1' or '0' for each.
std::string cpu_mask();

struct InterfaceRequest {
  /// Addresses, or names as NCCL_SOCKET_IFNAME has them: prefixes joined by ',' ("eth,ib"), with
  /// '=' before the list for whole names, and '^' before those that must not match ("^lo,docker",
  /// "eth,^eth7"). '*' and '?' stand for any characters and for any one ("eth*", "^docker*"). All
  /// that match are used. A name that fits an interface wholly means that one
  /// alone ("eth1" is not eth10). Empty, or only '^': choose one (of the others).
  std::string names;
  /// The store's host, empty if unknown: the interface that routes there is a good choice.
  std::string store_host;
  /// True if all ranks are on this host: loopback is then the best choice, and otherwise none.
  bool one_host = false;
};

/// Returns at least one of the candidates; throws Error with their list if none fits the request.
PYCOMM_API std::vector<Interface> choose_interfaces(
    const InterfaceRequest& request, const std::vector<Interface>& candidates = interfaces());

}  // namespace pycomm::tcp
