// The table of options. From it come the fields of GroupOptions and Env (core/env.h), what is read
// from the environment (core/env.cpp), the properties of the bindings, and `_C.OPTIONS`, from which
// come the doctor's texts and the table in docs/api/backend.md.
//
//   OPTION(type, name, default, variable, check, ranks, acts, meaning, text of the default, page)
//
// GROUP_OPTION: an argument of each group, whose default is the variable. PROCESS_OPTION: a
// variable alone. `check` is a function of core/env.cpp that parses the variable. `ranks` is `same`
// if all ranks must have the same value, else `any`. `acts` is what heeds the option: each `group`,
// or one whose ranks talk by `tcp`; pycomm/log.py names options that a group ignores. An empty text
// stands for the default's value; `page` is where docs say more. A file that includes this defines
// one macro or both.

#ifndef GROUP_OPTION
#define GROUP_OPTION(...)
#endif
#ifndef PROCESS_OPTION
#define PROCESS_OPTION(...)
#endif

GROUP_OPTION(std::string, transport, "auto", "PYCOMM_TRANSPORT", words({"auto", "shm", "tcp"}),
             same, group,
             "how ranks communicate: `shm` (shared memory), `tcp`, or `auto`: shared memory where "
             "the probe finds it, else TCP",
             "", "");
GROUP_OPTION(std::string, algo, "auto", "PYCOMM_ALGO",
             words({std::begin(kAlgoNames), std::end(kAlgoNames)}), same, group,
             "`auto`, or the algorithm of the collectives that have it. All but `auto` and "
             "`hierarchical` go over channels even where memory is shared",
             "", "algorithms.md");
GROUP_OPTION(std::string, link, "", "PYCOMM_LINK", link_rate, any, tcp,
             "rate of the link of this host: `200mbit` emulates one without root, as each rank "
             "sends no faster by TCP; `20mbit/50mbit` (sent and received) describes the real one, "
             "and ranks with a slower link own less of a reduction",
             "no limit", "networks.md");
GROUP_OPTION(int, sockets, 0, "PYCOMM_SOCKETS", whole(1, 16), same, tcp,
             "TCP sockets per peer, 1 to 16", "2; without bbr 4 from a round trip of 10 ms on", "");
GROUP_OPTION(std::string, congestion, "auto", "PYCOMM_CONGESTION", text, any, tcp,
             "TCP's congestion control of what this rank sends, by the kernel's name (`cubic`), or "
             "`auto`: bbr for peers at a round trip of 1 ms or more, if the kernel allows it, reno "
             "inside a host, else the system's",
             "", "networks.md#throughput");
GROUP_OPTION(std::string, interface, "", "PYCOMM_INTERFACE", text, any, tcp,
             "interfaces or addresses for TCP, all of which are used: `eth0`, `10.0.0.5`, "
             "`eth0,eth1`, `eth*`, `^docker*,lo`",
             "`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`, else loopback on one host, else the "
             "route to the store",
             "");
GROUP_OPTION(std::string, ports, "", "PYCOMM_PORTS", port_range, any, tcp,
             "ports on which ranks listen for each other, for firewalls: `29600-29700`; each group "
             "takes one per rank and interface",
             "any", "networks.md#addresses-and-ports");
GROUP_OPTION(std::string, advertise, "", "PYCOMM_ADVERTISE", text, any, tcp,
             "address by which ranks of other hosts reach this one, where that is not the "
             "interface's own (NAT, containers): `203.0.113.7`, or with the port that is mapped to "
             "the only one of `PYCOMM_PORTS`; one for each interface, joined by commas",
             "the interface's", "networks.md#addresses-and-ports");
GROUP_OPTION(std::string, secret, "", "PYCOMM_SECRET", secret, same, group,
             "secret of the handshake between ranks; the variable may name a file that holds it, "
             "`file:/run/secrets/x`, which only its user can write and not everybody can read",
             "random, shared by the store", "reliability.md#authentication");
GROUP_OPTION(
    std::string, tls, "auto", "PYCOMM_TLS", words({"auto", "on", "off"}), same, tcp,
    "`on`: every TCP connection is encrypted by TLS 1.3 (OpenSSL 3); `auto`: where a secret is "
    "given",
    "", "reliability.md#encryption");

PROCESS_OPTION(std::string, trace, "", "PYCOMM_TRACE", text, any, group,
               "folder into which every rank writes its recent operations when a group fails",
               "not written", "trace.md");
PROCESS_OPTION(Milliseconds, timeout, Milliseconds(300000), "PYCOMM_TIMEOUT", seconds, same, group,
               "seconds that one operation may take, unless `timeout=` is given",
               "300; torch's 1800 in its process groups", "");
PROCESS_OPTION(std::string, host_id, "", "PYCOMM_HOST_ID", text, any, group,
               "a name for this machine that no other has, where clones of one snapshot have the "
               "same hostname; equal for all its ranks",
               "the hostname", "");
PROCESS_OPTION(std::string, master_addr, "", "MASTER_ADDR", text, any, group,
               "torchrun's: the host of its store, whose route names the interface for TCP", "none",
               "");

#undef GROUP_OPTION
#undef PROCESS_OPTION
