// Handle: the text by which a process lets others form groups with it, whatever store they share or
// do not share. The user passes it on, by a store or a file.
//
//   pycomm-handle-2 GROUP ID TLS TAG SECRET ADDRESS,ADDRESS
//
// GROUP is a hash of the group's name, ID a number that no other process ever has, TAG a proof of
// the secret that was given to all ranks, which covers ID ("-": none was), SECRET one of the
// process alone ("-": one was given). Without PYCOMM_SECRET, anyone who has the handle can join.
#pragma once
#include <string>
#include <vector>

#include "core/types.h"
#include "transports/tcp/net/socket.h"

namespace pycomm::tcp {

struct PYCOMM_API Handle {
  std::string group;   ///< hash of the group's name
  std::string id;      ///< of this process's membership, never used again
  bool tls = false;    ///< its connections are encrypted
  std::string tag;     ///< proof of the secret that was given to all ranks; empty: none was
  std::string secret;  ///< that callers must prove; empty: the one that was given
  std::vector<Address> addresses;

  std::string text() const;
  /// Throws Error if the text is no handle of this version.
  static Handle parse(const std::string& text);
  /// Returns "10.0.0.5:4711", for errors.
  std::string where() const { return addresses.front().text(); }
};

/// Returns the handle of a process that others know by its addresses and the secret alone.
PYCOMM_API Handle known_handle(const std::vector<Address>& addresses, const GroupOptions& options);

/// Return 16 hexadecimal digits: a hash of a group's name, and a proof of the key of a secret
/// (transports/seal.h) for the handle with this ID.
PYCOMM_API std::string hash_of_group(const std::string& name);
PYCOMM_API std::string proof_of_secret(const std::string& key, const std::string& id);

}  // namespace pycomm::tcp
