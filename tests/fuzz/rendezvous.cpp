// What ranks tell each other before they are connected: values of the store, which anybody may have
// written who reaches it, handles, and messages of a rank that lies to an endpoint. A rank keeps to
// its memory, ends with an Error or goes on, and believes no value without a proof.
//
// Input: who is attacked, and what the attacker says. For values of the store that is how he
// changes what the attacked rank has published itself, so that most of it stays valid.
#include "transports/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "collectives/communicator.h"
#include "collectives/group/membership.h"
#include "tests/fuzz/target.h"
#include "transports/seal.h"
#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/connect/peers.h"
#include "transports/tcp/endpoint/group_formation.h"

namespace {

using namespace pycomm;
using namespace pycomm::tcp;

constexpr char kGroup[] = "g", kKey[] = "the key of a secret";
constexpr Milliseconds kPatience{2000};  // no wait takes as long, unless something hangs

// ------------------------------------------------------------------ values of the store

/// Changes a text: up to 7 edits, each a place, how many bytes go, how many come, and these.
std::string edited(std::string text, Reader& reader) {
  for (int edits = reader.byte() % 8; edits > 0 && !reader.empty(); edits--) {
    size_t at = reader.byte();
    if (at >= 128) at = text.size() - std::min(text.size(), at - 128);  // from the end
    at = std::min(at, text.size());
    const size_t goes = reader.byte();
    const auto comes = reader.take(reader.byte());
    text.replace(at, std::min(goes, text.size() - at), std::string(comes.begin(), comes.end()));
  }
  return text;
}

/// A store that shows rank 0 what it has written, and for the other ranks what a stranger writes.
class HostileStore final : public Store {
 public:
  HostileStore(bool appends, int size, Reader& reader)
      : appends_(appends), size_(size), reader_(reader) {}
  void set(const std::string& key, const std::string& value) override { values_[key] = value; }
  void append(const std::string& key, const std::string& value) override { values_[key] += value; }
  bool appends() const override { return appends_; }
  std::optional<std::string> find(const std::string& key) override {
    const auto known = answers_.find(key);
    if (known != answers_.end()) return known->second;
    return answers_[key] = answer(key);
  }

 private:
  std::optional<std::string> answer(const std::string& key) {
    const uint8_t how = reader_.byte();
    if (how % 16 == 15) return std::nullopt;
    const std::string suffix = "/0";
    const bool joint = key.find("/all from") != std::string::npos;
    std::string mine = values_[key];
    if (mine.empty() && !joint) {  // what rank 0 has published of this topic itself
      const size_t slash = key.rfind('/');
      if (slash != std::string::npos) mine = values_[key.substr(0, slash) + suffix];
    }
    if (!joint) return edited(mine, reader_);
    if (how % 16 == 14) return edited(mine, reader_);  // not of one form
    const size_t colon = std::min(mine.find(':'), mine.size() - 1);
    const std::string own = mine.empty() ? "" : mine.substr(colon + 1);
    std::string all = how % 16 == 13 ? "" : mine;
    for (int rank = all.empty() ? 0 : 1; rank < size_; rank++) {
      const std::string value = edited(own, reader_);
      all += std::to_string(rank) + " " + std::to_string(value.size()) + ":" + value;
    }
    return all;
  }

  const bool appends_;
  const int size_;
  Reader& reader_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::optional<std::string>> answers_;
};

Rendezvous hostile_rendezvous(Reader& reader, Milliseconds limit) {
  const uint8_t shape = reader.byte();
  Rendezvous rendezvous;
  rendezvous.group = kGroup;
  rendezvous.size = shape % 8 == 7 ? 40 : 2 + shape % 8 / 4;
  rendezvous.store = std::make_shared<HostileStore>(shape & 16, rendezvous.size, reader);
  rendezvous.deadline = Deadline::after(limit);
  if (shape & 32) rendezvous.key = kKey;
  return rendezvous;
}

void exchange(Reader& reader) {
  const Rendezvous rendezvous = hostile_rendezvous(reader, Milliseconds(0));
  const std::vector<int> ranks = all_ranks(rendezvous);
  announce(rendezvous, "more", "something");
  for (const char* topic : {"first", "more", "second"}) {
    const auto values = all_gather_values(rendezvous, topic, ranks, "value of this rank");
    require(values.size() == ranks.size(), "each rank has a value");
    require(rendezvous.key.empty(), "no value is believed without a proof");
  }
  find_word(rendezvous, "a word");
}

void addresses(Reader& reader) {
  const Rendezvous rendezvous = hostile_rendezvous(reader, Milliseconds(0));
  CommunicatorOptions options;
  options.tls = "off";
  options.secret = rendezvous.key;
  AddressExchange exchange(options);
  if (reader.byte() % 2) exchange.announce(rendezvous, true);
  std::vector<int> peers = all_ranks(rendezvous);
  peers.erase(peers.begin());
  for (const Peer& peer : exchange.run(rendezvous, peers).peers) {
    require(!peer.addresses.empty(), "a peer that was taken has an address");
  }
  require(rendezvous.key.empty(), "no card is believed without a proof");
}

void membership(Reader& reader) {
  Rendezvous rendezvous = hostile_rendezvous(reader, Milliseconds(0));
  const CommunicatorOptions options;
  Membership members(rendezvous, options);
  const std::string ours = members.first_value("settings");
  for (int rank = 1; rank < rendezvous.size; rank++) members.add(rank, edited(ours, reader));
  try {
    std::this_thread::sleep_for(rendezvous.poll_interval() / 2);
    members.interrupt_check();
  } catch (const Error&) {
    members.give_up(std::current_exception());
  }
}

/// The whole of a group that shares memory.
void group(Reader& reader) {
  const Rendezvous rendezvous = hostile_rendezvous(reader, Milliseconds(0));
  CommunicatorOptions options;
  options.transport = "shm";
  options.timeout = Milliseconds(20);
  Communicator(rendezvous.store, 0, rendezvous.size, options);
}

// ------------------------------------------------------------------ endpoints

std::unique_ptr<Endpoint>& endpoint() {
  static std::unique_ptr<Endpoint> endpoint;
  static int uses = 0;
  if (uses++ % 1000 == 0) {  // it remembers all uuids
    CommunicatorOptions options;
    options.tls = "off";
    options.secret.clear();
    options.interface = "127.0.0.1";
    endpoint = std::make_unique<Endpoint>(kGroup, options);
  }
  return endpoint;
}

/// A rank that knows the secret says anything to an endpoint, which goes on serving others.
void ask_endpoint(Reader& reader) {
  static int64_t uuid = 1'000'000;
  Endpoint& asked = *endpoint();
  asked.claim(++uuid, {});
  {
    EndpointConnection stranger(asked.handle(), "", Deadline::after(kPatience), nullptr);
    const auto said = reader.take(reader.left());
    try {
      stranger.send(std::string(said.begin(), said.end()), Deadline::after(kPatience));
    } catch (const Error&) {  // it was thrown out
    }
  }
  const Deadline limit = Deadline::after(kPatience);
  EndpointConnection honest(asked.handle(), "", limit, nullptr);
  honest.send(MessageWriter(MessageKind::question).number(uuid).finished(), limit);
  MessageReader answer(honest.receive(limit));
  require(answer.kind() == MessageKind::answer, "an endpoint goes on answering");
  require(answer.number<FormationState>() == FormationState::forms, "and says what is so");
  asked.release("");
}

void read_handle(Reader& reader) {
  const auto bytes = reader.take(reader.left());
  const Handle handle = Handle::parse(std::string(bytes.begin(), bytes.end()));
  require(!handle.where().empty(), "a handle has an address");
  require(Handle::parse(handle.text()).text() == handle.text(),
          "a handle is read as it is written");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  try {
    switch (reader.byte() % 16) {
      case 0:
      case 1:
        ask_endpoint(reader);
        break;
      case 3:
        read_handle(reader);
        break;
      case 4:
        membership(reader);
        break;
      case 5:
        group(reader);
        break;
      case 6:
      case 7:
      case 8:
        addresses(reader);
        break;
      default:
        exchange(reader);
    }
  } catch (const Error&) {  // the rank says what is wrong, and ends
  }
  return 0;
}
