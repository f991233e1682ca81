// Membership: which ranks have joined a rendezvous, and whether all of them can still be expected.
// Ranks cannot talk yet, but much is known: a rank that has joined names its process, which the
// others of its host see; ranks that are in a group already see each other there; and a rank that
// gives up publishes that in the store.
#pragma once
#include <exception>
#include <map>
#include <string>

#include "collectives/common/options.h"
#include "transports/process.h"
#include "transports/rendezvous.h"

namespace pycomm {

class Membership {
 public:
  static constexpr char kTopic[] = "here";  ///< key of the first value that each rank publishes

  /// `options` must live as long as this.
  Membership(const Rendezvous& rendezvous, const CommunicatorOptions& options);

  /// First value that this rank publishes: what all ranks must agree on, and our process.
  std::string first_value(const std::string& settings) const;
  /// Takes in the first value of a rank; returns what must be agreed on.
  std::string add(int rank, const std::string& value);

  /// Throws PeerLost if a rank has died, the reason of one that has given up, and what the options'
  /// interrupt throws.
  void interrupt_check();
  /// Marks the rendezvous as complete: later errors of this rank do not concern it.
  void leave();
  /// Fails the rendezvous because of `error`: tells the others. Throws it, or the error that caused
  /// it.
  [[noreturn]] void give_up(const std::exception_ptr& error);

 private:
  void look_for_deaths();
  void look_at_store();
  bool has_met(int rank);
  /// Returns `error`, or the loss or the published reason of another rank that explains it.
  std::exception_ptr behind(const std::exception_ptr& error);
  /// Throws the error that another rank has published, as its reason to give up.
  [[noreturn]] void throw_reason(const std::string& reason);
  [[noreturn]] void throw_died(int rank, const std::string& how);

  const Rendezvous rendezvous_;
  const CommunicatorOptions& options_;
  bool parent_was_over_ = false;
  size_t looks_ = 0;
  bool knows_ = false;                ///< we learned from the others what ended the rendezvous
  std::map<int, Process> processes_;  ///< of the ranks that have joined
  Deadline next_look_;
  Milliseconds answers_in_{0};  ///< response time of the store at the last poll
};

}  // namespace pycomm
