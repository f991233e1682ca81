#include "transports/rendezvous.h"

#include <algorithm>
#include <numeric>
#include <system_error>
#include <thread>

#include "core/sha256.h"
#include "transports/seal.h"

namespace pycomm {
namespace {

// In groups of up to this many ranks, each rank reads the values of all ranks at every poll of the
// store. In larger groups the first rank reads them, and publishes them once they are complete: n
// ranks that read n values again and again would be too much for the store.
constexpr size_t kReadByAll = 32;
// The pause between two polls of the store is an eighth of the time waited so far, so that a value
// is seen late by that much at most, and a wait of any length costs the store few requests.
constexpr auto kFirstPause = std::chrono::microseconds(50);
constexpr int kPauses = 8;
// A store whose answer takes this long is on another host, and not on the next one.
constexpr auto kFarStore = std::chrono::milliseconds(1);

// Separators of the values that travel with another: "value RS topic US value RS topic US value".
// Values may be any bytes (handles of memory are), so these bytes are escaped in them.
constexpr char kNext = '\x1e', kIs = '\x1f', kEscape = '\x1d';
constexpr char kEscapeMask = '\x40';

std::string escaped(const std::string& value) {
  std::string text;
  for (const char c : value) {
    const bool special = c == kNext || c == kIs || c == kEscape;
    if (special) text += kEscape;
    text += special ? static_cast<char>(c ^ kEscapeMask) : c;
  }
  return text;
}

std::string unescaped(const std::string& text) {
  std::string value;
  for (size_t i = 0; i < text.size(); i++) {
    const bool special = text[i] == kEscape && i + 1 < text.size();
    value += special ? static_cast<char>(text[++i] ^ kEscapeMask) : text[i];
  }
  return value;
}

Timeout not_complete(const Rendezvous& rendezvous, const std::string& topic,
                     const std::vector<int>& missing) {
  std::string names;
  for (const int rank : missing) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  return Timeout("rank " + std::to_string(rendezvous.rank) + ": group \"" + rendezvous.group +
                     "\" is not complete after " +
                     std::to_string(rendezvous.deadline.limit().count()) +
                     " ms, rank(s) that did not come (" + topic + "): " + names,
                 missing);
}

/// Calls look() until it finds something, with an interrupt check in between. Returns nothing at
/// the deadline.
template <typename Look>
auto poll_until(const Rendezvous& rendezvous, const Look& look) -> decltype(look()) {
  using std::chrono::microseconds;
  // Where the store is far away, ranks that come at the same time would miss each other's values
  // by little, and pay a round trip for it: their first request waits a fraction of one.
  const microseconds round_trip = rendezvous.store->round_trip();
  if (round_trip >= kFarStore) std::this_thread::sleep_for(round_trip / kPauses);
  const auto start = Deadline::Clock::now();
  for (;;) {
    const bool last = rendezvous.deadline.expired();
    if (auto found = look()) return found;
    if (last) return std::nullopt;
    rendezvous.interrupt_check();
    const auto waited =
        std::chrono::duration_cast<microseconds>(Deadline::Clock::now() - start) / kPauses;
    const auto pause = std::clamp<microseconds>(waited, kFirstPause, rendezvous.poll_interval());
    std::this_thread::sleep_for(
        std::min<microseconds>(pause, rendezvous.deadline.left() + Milliseconds(1)));
  }
}

std::string own_key(const Rendezvous& rendezvous, const std::string& topic, int rank) {
  return rendezvous.group + "/" + word_name(topic, rank);
}

Seal seal_of(const Rendezvous& rendezvous) { return {rendezvous.key, rendezvous.group}; }

/// Returns the name by which a rank's value is sealed: values of the first exchange are known
/// before the session is.
std::string sealed_name(const Rendezvous& rendezvous, const std::string& topic, int rank) {
  const RendezvousExchange& exchange = *rendezvous.exchange;
  const bool first = topic == exchange.first_topic;
  return word_name(topic, rank) + "/" + (first ? "" : exchange.session);
}

std::string what_of(const Rendezvous& rendezvous, const std::string& topic, int rank) {
  return "rank " + std::to_string(rendezvous.rank) + ": what the store has of rank " +
         std::to_string(rank) + " (" + topic + " of group \"" + rendezvous.group + "\")";
}

std::string opened(const Rendezvous& rendezvous, const std::string& topic, int rank,
                   const std::string& text) {
  return seal_of(rendezvous)
      .open(sealed_name(rendezvous, topic, rank), text, what_of(rendezvous, topic, rank));
}

/// The key that holds the values of all ranks, where the store can append: "rank length:value" of
/// each. Disjoint subsets of ranks that exchange the same topic have different first ranks.
std::string joint_key(const Rendezvous& rendezvous, const std::string& topic,
                      const std::vector<int>& ranks) {
  return rendezvous.group + "/" + topic + "/all from " + std::to_string(ranks.front());
}

/// In large groups: behind the key of the values that the first rank has read.
constexpr char kComplete[] = "/complete";

std::string joint_entry(int rank, const std::string& value) {
  return std::to_string(rank) + " " + std::to_string(value.size()) + ":" + value;
}

/// Takes a number without a sign from the text, and the separator behind it.
std::optional<size_t> take_number(const std::string& text, size_t& at, char separator) {
  constexpr size_t kDigits = 10;
  size_t number = 0;
  const size_t begin = at;
  for (; at < text.size() && at - begin < kDigits && text[at] >= '0' && text[at] <= '9'; at++) {
    number = 10 * number + static_cast<size_t>(text[at] - '0');
  }
  if (at == begin || at == text.size() || text[at++] != separator) return std::nullopt;
  return number;
}

/// Returns the entries of the joint key, by rank, sealed as they are.
std::map<int, std::string> parse_joint_value(const Rendezvous& rendezvous, const std::string& topic,
                                             const std::string& joint) {
  std::map<int, std::string> values;
  for (size_t at = 0; at < joint.size();) {
    const auto rank = take_number(joint, at, ' ');
    const auto size = rank ? take_number(joint, at, ':') : std::nullopt;
    if (!size || *size > joint.size() - at || *rank >= static_cast<size_t>(rendezvous.size)) {
      throw Error("rank " + std::to_string(rendezvous.rank) + ": the values of all ranks (" +
                  topic + " of group \"" + rendezvous.group +
                  "\") hold in the store what no rank publishes in a group of " +
                  std::to_string(rendezvous.size) +
                  "; give all ranks the same world size, let nobody else reach the store, and set "
                  "PYCOMM_SECRET");
    }
    if (!values.emplace(static_cast<int>(*rank), joint.substr(at, *size)).second) {
      throw Error(
          what_of(rendezvous, topic, static_cast<int>(*rank)) +
          " is there twice: two processes have this rank, or somebody else writes to the "
          "store; give each process a RANK of its own, let nobody else reach the store, and "
          "set PYCOMM_SECRET");
    }
    at += *size;
  }
  return values;
}

std::optional<std::vector<std::string>> in_order(std::map<int, std::string> values,
                                                 const std::vector<int>& ranks) {
  std::vector<std::string> result;
  for (const int rank : ranks) {
    const auto found = values.find(rank);
    if (found == values.end()) return std::nullopt;
    result.push_back(std::move(found->second));
  }
  return result;
}

void publish(const Rendezvous& rendezvous, const std::string& topic, const std::vector<int>& ranks,
             const std::string& value) {
  Store& store = *rendezvous.store;
  const bool appends = store.appends();
  const std::string text =
      seal_of(rendezvous).close(sealed_name(rendezvous, topic, rendezvous.rank), value);
  if (!appends || ranks.size() > kReadByAll)
    store.set(own_key(rendezvous, topic, rendezvous.rank), text);
  if (appends)
    store.append(joint_key(rendezvous, topic, ranks), joint_entry(rendezvous.rank, text));
}

/// Returns all values, sealed, if they are there now.
std::optional<std::vector<std::string>> collect(const Rendezvous& rendezvous,
                                                const std::string& topic,
                                                const std::vector<int>& ranks) {
  if (rendezvous.store->appends()) {
    const auto joint = rendezvous.store->find(joint_key(rendezvous, topic, ranks));
    if (!joint) return std::nullopt;
    return in_order(parse_joint_value(rendezvous, topic, *joint), ranks);
  }
  std::vector<std::string> values;
  for (const int rank : ranks) {
    auto value = rendezvous.store->find(own_key(rendezvous, topic, rank));
    if (!value) return std::nullopt;
    values.push_back(std::move(*value));
  }
  return values;
}

/// Does the same as collect(), but in a large group only the first rank reads each rank's value.
std::optional<std::vector<std::string>> collect_all(const Rendezvous& rendezvous,
                                                    const std::string& topic,
                                                    const std::vector<int>& ranks) {
  if (ranks.size() <= kReadByAll) return collect(rendezvous, topic, ranks);
  const std::string key = joint_key(rendezvous, topic, ranks) + kComplete;
  if (rendezvous.rank != ranks.front()) {
    const auto joint = rendezvous.store->find(key);
    if (!joint) return std::nullopt;
    return in_order(parse_joint_value(rendezvous, topic, *joint), ranks);
  }
  auto values = collect(rendezvous, topic, ranks);
  if (!values) return values;
  std::string joint;
  for (size_t i = 0; i < ranks.size(); i++) joint += joint_entry(ranks[i], (*values)[i]);
  rendezvous.store->set(key, joint);
  return values;
}

std::string with_announcements(const Rendezvous& rendezvous, const std::string& value) {
  std::string text = escaped(value);
  for (const auto& [topic, value] : rendezvous.exchange->published)
    text += kNext + topic + kIs + escaped(value);
  rendezvous.exchange->published.clear();
  return text;
}

constexpr char kNonceTopic[] = "nonce";

/// In the first exchange of a group with a secret each rank publishes a nonce.
void begin_session(const Rendezvous& rendezvous, const std::string& topic) {
  RendezvousExchange& exchange = *rendezvous.exchange;
  if (!exchange.first_topic.empty()) return;
  exchange.first_topic = topic;
  if (!rendezvous.key.empty()) announce(rendezvous, kNonceTopic, random_secret());
}

void note_session(const Rendezvous& rendezvous) {
  RendezvousExchange& exchange = *rendezvous.exchange;
  if (rendezvous.key.empty() || !exchange.session.empty()) return;
  std::string nonces;
  for (const std::string& nonce : exchange.received[kNonceTopic]) nonces += nonce + " ";
  const Digest session = sha256(nonces);
  exchange.session = hexadecimal({session.data(), session.size()});
}

/// Strips from each value what was announced with it, and keeps the announcements of the topics
/// that all ranks have announced.
void take_announcements(const Rendezvous& rendezvous, std::vector<std::string>& values) {
  std::map<std::string, std::map<size_t, std::string>> received;  // by topic and rank
  for (size_t rank = 0; rank < values.size(); rank++) {
    std::string& value = values[rank];
    const size_t end = std::min(value.find(kNext), value.size());
    for (size_t begin = end; begin < value.size();) {
      const size_t next = std::min(value.find(kNext, begin + 1), value.size());
      const std::string item = value.substr(begin + 1, next - begin - 1);
      const size_t is = std::min(item.find(kIs), item.size());
      received[item.substr(0, is)][rank] = unescaped(item.substr(std::min(is + 1, item.size())));
      begin = next;
    }
    value = unescaped(value.substr(0, end));
  }
  for (auto& [topic, texts] : received) {
    if (texts.size() != values.size()) continue;
    std::vector<std::string>& all = rendezvous.exchange->received[topic];
    all.clear();
    for (auto& [rank, text] : texts) all.push_back(std::move(text));
  }
}

}  // namespace

Rendezvous make_rendezvous(std::shared_ptr<Store> store, const std::string& group, int rank,
                           int size, const std::string& secret, Milliseconds timeout) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                " ranks: the rank must be at least 0 and less than the number of ranks");
  }
  if (!store && size > 1) throw Error("a group of more than one rank needs a store; pass one");
  Rendezvous rendezvous;
  rendezvous.store = store ? std::move(store) : make_local_store();
  rendezvous.group = group;
  rendezvous.rank = rank;
  rendezvous.size = size;
  rendezvous.key = key_of_secret(secret);
  rendezvous.deadline = Deadline::after(timeout);
  return rendezvous;
}

std::vector<std::string> all_gather_values(const Rendezvous& rendezvous, const std::string& topic,
                                           const std::vector<int>& ranks,
                                           const std::string& value) {
  const auto received = rendezvous.exchange->received.find(topic);
  if (received != rendezvous.exchange->received.end()) {
    std::vector<std::string> values;
    for (const int rank : ranks) values.push_back(received->second[static_cast<size_t>(rank)]);
    return values;
  }
  const bool whole = static_cast<int>(ranks.size()) == rendezvous.size;
  if (whole) begin_session(rendezvous, topic);
  const std::string ours = whole ? with_announcements(rendezvous, value) : value;
  publish(rendezvous, topic, ranks, ours);
  auto values = poll_until(rendezvous, [&] { return collect_all(rendezvous, topic, ranks); });
  if (values) {
    for (size_t i = 0; i < ranks.size(); i++) {
      (*values)[i] = opened(rendezvous, topic, ranks[i], (*values)[i]);
    }
  } else {
    const Milliseconds all_the_time = std::chrono::hours(1);  // this poll is the last one
    const auto known = published_values(rendezvous, topic, ranks, ranks, all_the_time);
    std::vector<int> missing;
    for (const int rank : ranks) {
      if (known.count(rank) == 0) missing.push_back(rank);
    }
    if (!missing.empty()) throw not_complete(rendezvous, topic, missing);
    values = in_order(known, ranks);
  }
  for (size_t i = 0; i < ranks.size() && !rendezvous.key.empty(); i++) {
    // One of an earlier group would have a right proof, and its nonce would let others pass.
    if (ranks[i] != rendezvous.rank || (*values)[i] == ours) continue;
    throw Error(what_of(rendezvous, topic, rendezvous.rank) +
                " is not what it has published: somebody else writes to the store; let nobody else "
                "reach it");
  }
  if (whole) {
    take_announcements(rendezvous, *values);
    note_session(rendezvous);
  }
  return *values;
}

void announce(const Rendezvous& rendezvous, const std::string& topic, const std::string& value) {
  rendezvous.exchange->published[topic] = value;
}

std::map<int, std::string> published_values(const Rendezvous& rendezvous, const std::string& topic,
                                            const std::vector<int>& ranks,
                                            const std::vector<int>& wanted,
                                            Milliseconds time_limit) {
  std::map<int, std::string> values;
  if (rendezvous.store->appends() &&
      (ranks.size() <= kReadByAll || wanted.size() == ranks.size())) {
    if (const auto joint = rendezvous.store->find(joint_key(rendezvous, topic, ranks))) {
      values = parse_joint_value(rendezvous, topic, *joint);
    }
  } else {
    const auto start = Deadline::Clock::now();
    for (const int rank : wanted) {
      if (auto value = rendezvous.store->find(own_key(rendezvous, topic, rank)))
        values[rank] = *value;
      if (Deadline::Clock::now() - start >= time_limit) break;
    }
  }
  for (auto& [rank, value] : values) value = opened(rendezvous, topic, rank, value);
  return values;
}

std::string plain_value(const std::string& value) {
  return unescaped(value.substr(0, value.find(kNext)));
}

void forget(const Rendezvous& rendezvous, const std::vector<std::string>& topics) {
  const std::vector<int> ranks = all_ranks(rendezvous);
  const bool large = ranks.size() > kReadByAll;
  const bool appends = rendezvous.store->appends();
  std::vector<std::string> keys;
  for (const std::string& topic : topics) {
    const std::string joint = joint_key(rendezvous, topic, ranks);
    if (appends) keys.push_back(joint);
    if (large) keys.push_back(joint + kComplete);
    if (appends && !large) continue;
    for (const int rank : ranks) keys.push_back(own_key(rendezvous, topic, rank));
  }
  const auto erase = [store = rendezvous.store, counter = rendezvous.group + "/connected",
                      size = rendezvous.size, keys = std::move(keys)] {
    try {
      if (store->count(counter) != size) return;
      for (const std::string& key : keys) store->erase(key);
    } catch (const std::exception&) {  // a store that is gone holds nothing, either
    }
  };
  if (rendezvous.store->round_trip().count() == 0) return erase();
  try {
    std::thread(erase).detach();  // it ends with the answer
  } catch (const std::system_error&) {
    erase();
  }
}

void set_word(const Rendezvous& rendezvous, const std::string& name, const std::string& word) {
  rendezvous.store->set(rendezvous.group + "/" + name, seal_of(rendezvous).close(name, word));
}

std::optional<std::string> find_word(const Rendezvous& rendezvous, const std::string& name) {
  const auto text = rendezvous.store->find(rendezvous.group + "/" + name);
  if (!text) return std::nullopt;
  return seal_of(rendezvous)
      .open(name, *text,
            "rank " + std::to_string(rendezvous.rank) + ": what the store has as \"" + name +
                "\" of group \"" + rendezvous.group + "\"");
}

std::string word_name(const std::string& topic, int rank) {
  return topic + "/" + std::to_string(rank);
}

std::string word_of(const Rendezvous& rendezvous, const std::string& topic, int rank) {
  const std::string name = word_name(topic, rank);
  const auto word = poll_until(rendezvous, [&] { return find_word(rendezvous, name); });
  if (word) return *word;
  throw not_complete(rendezvous, topic, {rank});
}

std::vector<int> all_ranks(const Rendezvous& rendezvous) {
  std::vector<int> ranks(static_cast<size_t>(rendezvous.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace pycomm
