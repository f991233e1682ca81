// How ranks exchange a word each through the store before they can talk.
#pragma once
#include <string>
#include <vector>

#include "transports/transport.h"

namespace pycomm {

/// Sets our word under "<group>/<topic>/<rank>" and returns everybody's, in the order of `ranks`
/// (which include ours). Throws Timeout that names all ranks that said nothing, and what the
/// meeting's look_out throws.
std::vector<std::string> exchange(const Rendezvous& meeting, const std::string& topic,
                                  const std::vector<int>& ranks, const std::string& word);

/// Throws Timeout that names the ranks of the group that have set no word under one of these
/// topics, of the first where there are any. Those for whom a rank waits in vain may be waiting for
/// them.
void throw_if_absent(const Rendezvous& meeting, const std::vector<std::string>& topics);

/// What `rank` alone sets under such a key. Throws Timeout that names it.
std::string word_of(const Rendezvous& meeting, const std::string& topic, int rank);

}  // namespace pycomm
