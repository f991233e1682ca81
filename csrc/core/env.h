// Environment variables that the core reads. Nothing else calls getenv.
#pragma once
#include <string>

#include "core/deadline.h"
#include "core/types.h"

namespace pycomm {

/// Values of PYCOMM_ALGO; docs/algorithms.md describes them.
constexpr const char* kAlgoNames[] = {"auto",     "flat",        "direct",           "one_shot",
                                      "two_shot", "bruck",       "halving_doubling", "ring",
                                      "tree",     "hierarchical"};

/// Rates of a link in bytes per second; 0: not known.
struct LinkRate {
  double send = 0, receive = 0;
};

/// Values of the variables, read once, at first use. An invalid value raises Error and names the
/// variable.
struct Env {
  /// PYCOMM_TRANSPORT: "auto" (shared memory where the probe finds it, else TCP), "shm" or "tcp".
  std::string transport = "auto";
  /// PYCOMM_ALGO: "auto", or the algorithm of the collectives that have it: one of kAlgoNames. All
  /// but "auto" and "hierarchical" go over channels even where memory is shared.
  std::string algo = "auto";
  /// PYCOMM_LINK: rate to which each rank paces what it sends by TCP, such as "1gbit" or
  /// "200mbit"; in bytes per second here, 0 for no limit. For trying out slow links without root.
  double link_bytes_per_second = 0;
  /// PYCOMM_RATE: what the link of this host carries, such as "100mbit", or "20mbit/50mbit" if it
  /// sends 20 and receives 50: ranks with a slower link own less of a reduction. Ranks need not
  /// agree; empty: PYCOMM_LINK, if that is set, else no limit.
  std::string rate;
  /// PYCOMM_SOCKETS: TCP sockets per peer, 1 to 16; equal on all ranks. 0, if it is not set: 2, and
  /// 4 for a peer at a round trip of 10 ms or more.
  int sockets = 0;
  /// PYCOMM_CONGESTION: TCP's congestion control of all connections, by the kernel's name ("cubic",
  /// "reno", "bbr"); it rules what this rank sends, so ranks need not agree. "auto": bbr for peers
  /// at a round trip of a millisecond or more, reno inside a host, else the system's.
  std::string congestion = "auto";
  /// PYCOMM_INTERFACE: network interfaces or addresses for TCP, such as "eth0", "10.0.0.5",
  /// "eth0,eth1" (both are used), "eth*" or "^docker,lo"; else what GLOO_SOCKET_IFNAME or
  /// NCCL_SOCKET_IFNAME say. Empty: loopback if all ranks are on one host, else the route to the
  /// store.
  std::string interface;
  /// PYCOMM_PORTS: the ports on which a rank may listen for others, such as "29600-29700" or
  /// "29600"; empty: any. Each group takes one for each interface. Ranks need not agree.
  std::string ports;
  /// PYCOMM_ADVERTISE: the address by which ranks of other hosts reach this one, where that is not
  /// the interface's own (NAT, containers): "203.0.113.7", or with the port that is mapped to the
  /// only one of PYCOMM_PORTS: "203.0.113.7:40000". One for each interface, joined by ','.
  std::string advertise;
  /// PYCOMM_HOST_ID: a unique name of this machine, where several have the same hostname and were
  /// cloned from one snapshot; equal for all ranks of a machine. Empty: the hostname.
  std::string host_id;
  /// MASTER_ADDR: host of torchrun's store; only its route matters here.
  std::string master_addr;
  /// PYCOMM_TIMEOUT: seconds that one operation may take, if the caller gives no timeout. A process
  /// group of torch has torch's 30 minutes if this is not set.
  Milliseconds timeout{300000};
  /// PYCOMM_SECRET: secret of the handshake; empty: each rank makes one for those who connect to it
  /// and shares it by the store.
  std::string secret;
  /// PYCOMM_TLS: "on": every TCP connection is encrypted by TLS 1.3 (OpenSSL 3); "off". Equal on
  /// all ranks.
  bool tls = false;
  /// PYCOMM_CHECKSUM: what the checksum of TCP frames covers: "payload" (CRC-32C over header and
  /// payload), "header", or "auto": payloads too, unless they stay on the host, where only memory
  /// carries them, or are encrypted, which authenticates them. Each frame says what its checksum
  /// covers; ranks need not agree.
  std::string checksum = "auto";
  /// PYCOMM_CHECK: "results": checksums of results and parameters travel with the next operation,
  /// and ranks that differ are an error (docs/reliability.md); "none". Equal on all ranks.
  std::string check = "none";
  /// PYCOMM_SPIN: polls of a wait on shared memory before it yields; -1: chosen by cores.
  int spin = -1;
  /// PYCOMM_TRACE: folder into which every rank writes its recent operations when the group fails;
  /// empty: they are not written. docs/trace.md.
  std::string trace;
  /// PYCOMM_TRACE_SIZE: operations that each group remembers, 0 to 1000000.
  int trace_size = 2048;
};

PYCOMM_API const Env& env();

/// Ports of TCP, `first` to `last`; 0 to 0: any.
struct PortRange {
  int first = 0, last = 0;
};
/// "29600-29700", "29600", or "" for any. Throws Error.
PYCOMM_API PortRange parse_ports(const std::string& text);

/// "200mbit", "1.5gbit", "10MB" (per second) to bytes per second. Throws Error.
PYCOMM_API double parse_rate(const std::string& text);
/// "100mbit", "20mbit/50mbit" (what is sent and what is received), or "" if nothing is known.
/// Throws Error.
PYCOMM_API LinkRate parse_link_rate(const std::string& text);

}  // namespace pycomm
