#include "transports/meeting.h"

#include <algorithm>
#include <numeric>

namespace pycomm {
namespace {

Timeout not_complete(const Rendezvous& meeting, const std::string& topic,
                     const std::vector<int>& missing) {
  std::string names;
  for (const int rank : missing) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  return Timeout("rank " + std::to_string(meeting.rank) + ": group \"" + meeting.group +
                     "\" is not complete after " +
                     std::to_string(meeting.deadline.limit().count()) +
                     " ms, rank(s) that did not come (" + topic + "): " + names,
                 missing);
}

/// read(deadline) again and again, with a look out in between. Throws Timeout at the end.
template <typename Read>
auto patiently(const Rendezvous& meeting, const Read& read) {
  for (;;) {
    try {
      return read(Deadline::after(std::min(meeting.deadline.left(), meeting.patience())));
    } catch (const Timeout&) {
      if (meeting.deadline.expired()) throw;
    }
    meeting.look_out();
  }
}

}  // namespace

std::vector<std::string> exchange(const Rendezvous& meeting, const std::string& topic,
                                  const std::vector<int>& ranks, const std::string& word) {
  const std::string prefix = meeting.group + "/" + topic + "/";
  meeting.store->set(prefix + std::to_string(meeting.rank), word);
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(prefix + std::to_string(rank));
  try {
    return patiently(meeting, [&](Deadline part) { return meeting.store->get_many(keys, part); });
  } catch (const Timeout&) {  // of whom?
  }
  std::vector<std::string> words;
  std::vector<int> missing;
  for (size_t i = 0; i < ranks.size(); i++) {
    if (auto word = meeting.store->find(keys[i])) {
      words.push_back(std::move(*word));
    } else {
      missing.push_back(ranks[i]);
    }
  }
  if (missing.empty()) return words;
  throw not_complete(meeting, topic, missing);
}

void throw_if_absent(const Rendezvous& meeting, const std::vector<std::string>& topics) {
  for (const std::string& topic : topics) {
    std::vector<int> missing;
    for (const int rank : all_ranks(meeting)) {
      const std::string key = meeting.group + "/" + topic + "/" + std::to_string(rank);
      if (!meeting.store->find(key)) missing.push_back(rank);
    }
    if (!missing.empty()) throw not_complete(meeting, topic, missing);
  }
}

std::string word_of(const Rendezvous& meeting, const std::string& topic, int rank) {
  const std::string key = meeting.group + "/" + topic + "/" + std::to_string(rank);
  try {
    return patiently(meeting, [&](Deadline part) { return meeting.store->get(key, part); });
  } catch (const Timeout&) {
    throw not_complete(meeting, topic, {rank});
  }
}

std::vector<int> all_ranks(const Rendezvous& meeting) {
  std::vector<int> ranks(static_cast<size_t>(meeting.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace pycomm
