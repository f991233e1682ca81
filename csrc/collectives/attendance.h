// Who has come to a meeting, and whether all of them can still be expected. Ranks cannot talk yet,
// but much is known: a rank that has come names its process, which the others of its host see;
// ranks that are in a group already see each other there; and who gives up says so in the store.
#pragma once
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "transports/process.h"
#include "transports/transport.h"

namespace pycomm {

class Attendance {
 public:
  static constexpr char kTopic[] = "here";  ///< of the first word of each rank in the store

  /// `options` must live as long as this.
  Attendance(const Rendezvous& meeting, const CommunicatorOptions& options);

  /// The first word: what all ranks must agree on, and our process.
  std::string word(const std::string& agreed) const;
  /// Takes in the first word of a rank; returns what must be agreed on.
  std::string came(int rank, const std::string& word);

  /// Throws PeerLost if a rank has died, the reason of one that has given up, and what the options'
  /// interrupt throws.
  void look_out();
  /// We have met: what becomes of us from now on does not concern the meeting.
  void leave();
  /// We cannot meet because of `error`: tells the others. Throws it, or what is behind it.
  [[noreturn]] void give_up(const std::exception_ptr& error);

 private:
  std::string key(const std::string& topic, int rank) const;
  void look_for_deaths();
  void look_for_words();
  bool has_met(int rank);
  /// `error`, or the loss or the words of another rank that explain it.
  std::exception_ptr behind(const std::exception_ptr& error);
  [[noreturn]] void throw_died(int rank, const std::string& how) const;

  const Rendezvous meeting_;
  const CommunicatorOptions& options_;
  const std::string reason_key_;
  bool parent_was_over_ = false;
  bool knows_ = false;                ///< what has ended the meeting, from the others
  std::map<int, Process> processes_;  ///< of the ranks that came
  Deadline next_look_;
};

}  // namespace pycomm
