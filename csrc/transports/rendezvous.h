// Rendezvous: ranks exchange values through the store before they are connected. With a secret each
// value carries a proof of it (transports/seal.h), which covers the group, the topic and the rank,
// and from the second exchange on the nonces of all ranks.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "transports/store.h"

namespace pycomm {

/// Published values by topic, so that one exchange serves several (transports/rendezvous.h).
struct RendezvousExchange {
  std::map<std::string, std::string> published;              ///< ours, for the next exchange
  std::map<std::string, std::vector<std::string>> received;  ///< all ranks', of earlier exchanges
  std::string first_topic;  ///< of the first exchange of the whole group
  /// Hash of the nonces that all ranks have published in the first exchange; empty until then, and
  /// without a secret. Proofs of later values and of connections cover it, so nothing that an
  /// earlier group of this name has said is of use.
  std::string session;
};

/// A rank's view of the bootstrap: the store, the group and the rank's place in it.
struct Rendezvous {
  std::shared_ptr<Store> store;
  std::string group;  ///< unique name of the group; prefix of all its keys in the store
  int rank = 0;
  int size = 1;
  Deadline deadline = Deadline::after(Milliseconds(300000));
  /// The interrupt check, which every wait for other ranks calls: after poll_interval() at most, or
  /// a few round trips to the store. Throws if the wait is in vain: a rank has died or given up, or
  /// this rank is to stop.
  std::function<void()> interrupt_check = [] {};
  /// The longest pause between two polls of the store. No request ends by this time limit: it may
  /// well be shorter than the store's answer takes.
  Milliseconds poll_interval() const { return Milliseconds(40 + size / 4); }
  std::shared_ptr<RendezvousExchange> exchange = std::make_shared<RendezvousExchange>();
  /// Of the secret that was given to all ranks (transports/seal.h); empty: none was.
  std::string key;
};

/// `secret`: that was given to all ranks. Throws Error for a rank that is none, and if there is no
/// store and more than one rank.
PYCOMM_API Rendezvous make_rendezvous(std::shared_ptr<Store> store, const std::string& group,
                                      int rank, int size, const std::string& secret,
                                      Milliseconds timeout);

/// Returns 0 .. size - 1.
PYCOMM_API std::vector<int> all_ranks(const Rendezvous& rendezvous);

/// Publishes our value under "<group>/<topic>/<rank>" and returns those of all `ranks`, in their
/// order (`ranks` includes ours, and is the same for each of them). Throws Timeout that names all
/// ranks that published nothing, Error if a value has no proof of the secret, or if a rank has
/// published two, and whatever the rendezvous's interrupt_check throws.
///
/// The store may be far away and many ranks may ask it, so no request blocks in the store until its
/// value is there, and where the store can append(), a rank asks for one value however many ranks
/// there are.
PYCOMM_API std::vector<std::string> all_gather_values(const Rendezvous& rendezvous,
                                                      const std::string& topic,
                                                      const std::vector<int>& ranks,
                                                      const std::string& value);

/// Sets our value for a later exchange of the whole group: it travels with the next exchange, and
/// the later one then needs no store.
void announce(const Rendezvous& rendezvous, const std::string& topic, const std::string& value);

/// Returns the values that some of the `wanted` ranks have published so far: all that one request
/// to the store can answer, and of the others as many as `time_limit` allows, at least one. `ranks`
/// is as in all_gather_values(). A value here includes what was announced with it: plain_value()
/// strips that.
std::map<int, std::string> published_values(const Rendezvous& rendezvous, const std::string& topic,
                                            const std::vector<int>& ranks,
                                            const std::vector<int>& wanted,
                                            Milliseconds time_limit);

std::string plain_value(const std::string& value);

/// Takes the values of these topics out of the store once all ranks have called this, if the store
/// can count: the last rank does it. Where the store is remote, its answer is waited for by a
/// thread of its own, so the caller is not delayed.
void forget(const Rendezvous& rendezvous, const std::vector<std::string>& topics);

/// Words are values that a single rank publishes at its own time, under "<group>/<name>".
PYCOMM_API void set_word(const Rendezvous& rendezvous, const std::string& name,
                         const std::string& word);
PYCOMM_API std::optional<std::string> find_word(const Rendezvous& rendezvous,
                                                const std::string& name);
/// Returns "<topic>/<rank>", the name of a word of this rank.
std::string word_name(const std::string& topic, int rank);
/// Waits for the word `topic` of a rank. Throws Timeout that names the rank.
PYCOMM_API std::string word_of(const Rendezvous& rendezvous, const std::string& topic, int rank);

}  // namespace pycomm
