// What a rank knows of its host, and which network interfaces its group uses.
#pragma once
#include <string>
#include <vector>

#include "transports/tcp_socket.h"

namespace pycomm::tcp {

struct Interface {
  std::string name;  ///< "eth0"
  Address address;   ///< one that other hosts can reach, except on the loopback interface
};

/// Interfaces that are up, one entry for each address that can be published; IPv4 first.
PYCOMM_API std::vector<Interface> interfaces();

/// Equal for two processes exactly if they reach each other by the loopback interface: same running
/// kernel, same network namespace.
std::string host_id();

/// The CPUs on which this process may run: a '1' or '0' for each.
std::string cpu_mask();

struct InterfaceWish {
  /// Addresses, or names as NCCL_SOCKET_IFNAME has them: prefixes joined by ',' ("eth,ib"), with
  /// '=' before the list for whole names, and '^' before those that must not match ("^lo,docker",
  /// "eth,^eth7"). All that match are used. A name that fits an interface wholly means that one
  /// alone ("eth1" is not eth10). Empty, or only '^': choose one (of the others).
  std::string names;
  /// Where the store is, empty if unknown: the interface that routes there is a good choice.
  std::string store_host;
  /// All ranks are on this host: the loopback interface is the best choice, and otherwise none.
  bool one_host = false;
};

/// At least one; throws Error with the list of interfaces if the wish fits none.
std::vector<Interface> choose_interfaces(const InterfaceWish& wish);
/// The choice among given candidates; for tests.
PYCOMM_API std::vector<Interface> choose_interfaces(const InterfaceWish& wish,
                                                    const std::vector<Interface>& candidates);

}  // namespace pycomm::tcp
