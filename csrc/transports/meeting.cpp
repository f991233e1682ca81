#include "transports/meeting.h"

#include <numeric>

namespace pycomm {
namespace {

Timeout not_complete(const Rendezvous& meeting, const std::string& topic,
                     const std::string& missing) {
  return Timeout("rank " + std::to_string(meeting.rank) + ": group \"" + meeting.group +
                 "\" is not complete after " + std::to_string(meeting.deadline.limit().count()) +
                 " ms, rank(s) that did not come (" + topic + "): " + missing);
}

}  // namespace

std::vector<std::string> exchange(const Rendezvous& meeting, const std::string& topic,
                                  const std::vector<int>& ranks, const std::string& word) {
  const std::string prefix = meeting.group + "/" + topic + "/";
  meeting.store->set(prefix + std::to_string(meeting.rank), word);
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(prefix + std::to_string(rank));
  try {
    return meeting.store->get_many(keys, meeting.deadline);
  } catch (const Timeout&) {  // of whom?
  }
  std::vector<std::string> words;
  std::string missing;
  for (size_t i = 0; i < ranks.size(); i++) {
    try {
      words.push_back(meeting.store->get(keys[i], meeting.deadline));
    } catch (const Timeout&) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(ranks[i]);
    }
  }
  if (missing.empty()) return words;
  throw not_complete(meeting, topic, missing);
}

std::string word_of(const Rendezvous& meeting, const std::string& topic, int rank) {
  try {
    return meeting.store->get(meeting.group + "/" + topic + "/" + std::to_string(rank),
                              meeting.deadline);
  } catch (const Timeout&) {
    throw not_complete(meeting, topic, std::to_string(rank));
  }
}

std::vector<int> all_ranks(const Rendezvous& meeting) {
  std::vector<int> ranks(static_cast<size_t>(meeting.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace pycomm
