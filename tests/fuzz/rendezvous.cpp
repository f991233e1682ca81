// What ranks tell each other before they are connected: values of the store, which anybody may have
// written who reaches it, and messages between members and endpoints, handles among them, where one
// of the ranks lies. A rank keeps to its memory, ends with an Error or goes on, and believes no
// value without a proof.
//
// Input: who is attacked, and what the attacker says. For values of the store that is how he
// changes what the attacked rank has published itself, so that most of it stays valid.
#include "transports/rendezvous.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
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
  AnnouncedPeer announced;
  if (reader.byte() % 2) announced = announce_peer(rendezvous, options, true);
  std::vector<int> peers = all_ranks(rendezvous);
  peers.erase(peers.begin());
  for (const Peer& peer :
       exchange_addresses(rendezvous, peers, options, std::move(announced)).peers) {
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

/// The endpoint of a rank 0 that lies: it answers each message with the next piece of the input.
class Liar {
 public:
  explicit Liar(std::vector<std::string> answers)
      : answers_(std::move(answers)), listener_(listen_on(loopback(), {})) {
    handle_.group = hash_of_group(kGroup);
    handle_.id = "0123456789abcdef";
    handle_.secret = kKey;
    handle_.addresses = {Address::local(listener_.get())};
    thread_ = std::thread([this] { run(); });
  }
  ~Liar() {
    stop_ = true;
    thread_.join();
    for (std::thread& each : callers_) each.join();
  }
  const Handle& handle() const { return handle_; }

 private:
  static Address loopback() {
    Address address;
    Address::parse("127.0.0.1:0", address);
    return address;
  }
  void run() {
    while (!stop_) {
      if (Fd fd = accept_from(listener_.get())) {
        auto caller = std::make_shared<Fd>(std::move(fd));
        callers_.emplace_back([this, caller] { answer(std::move(*caller)); });
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  }
  void answer(Fd fd) {
    Greeting greeting(Handshake(kKey, "endpoint " + handle_.id, 0, 2, 1, false));
    for (int error = 0;;) {
      const auto progress = greeting.advance(fd.get(), error);
      if (progress == Greeting::Progress::done) break;
      if (progress != Greeting::Progress::waits || !wait()) return;
    }
    SecureSocket socket = greeting.sock(std::move(fd));
    std::string heard, message;
    for (char buffer[4096];;) {
      while (take_message(heard, message)) {
        const MessageKind kind = MessageReader(message).kind();
        const bool asks = kind == MessageKind::find || kind == MessageKind::question;
        std::string next;
        if (asks && !take_answer(next)) return;
        for (size_t done = 0; done < next.size();) {
          const ssize_t n = socket.send(next.data() + done, next.size() - done);
          if (n < 0 && (errno != EAGAIN || !wait())) return;
          done += n > 0 ? static_cast<size_t>(n) : 0;
        }
      }
      const ssize_t n = socket.receive(buffer, sizeof buffer);
      if (n > 0) {
        heard.append(buffer, static_cast<size_t>(n));
      } else if (n == 0 || errno != EAGAIN || !wait()) {
        return;
      }
    }
  }
  bool wait() const {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return !stop_;
  }
  bool take_answer(std::string& next) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (answers_.empty()) return false;
    next = answers_.front();
    answers_.erase(answers_.begin());
    return true;
  }

  std::vector<std::string> answers_;
  std::mutex mutex_;
  Fd listener_;
  Handle handle_;
  std::atomic<bool> stop_{false};
  std::list<std::thread> callers_;
  std::thread thread_;
};

/// A member forms a group at the endpoint of a rank 0 that lies.
void form_group(Reader& reader) {
  static int64_t uuid = 0;
  const bool asks = reader.byte() == 'p' && reader.byte() == 'q';  // slow: a check comes late
  std::vector<std::string> answers;
  while (!reader.empty() && answers.size() < 16) {
    const auto answer = reader.take(reader.byte());
    answers.emplace_back(answer.begin(), answer.end());
  }
  Liar liar(std::move(answers));
  Endpoint& ours = *endpoint();
  GroupFormation formation(ours, ++uuid, {liar.handle().text(), ours.handle().text()}, "",
                           Milliseconds(asks ? 800 : 50), nullptr);
  try {
    const auto store = formation.store();
    for (int i = 0; i < 16; i++) {
      store->find("a key");
      if (asks && i == 0) std::this_thread::sleep_for(Milliseconds(600));
      if (asks) formation.check_members();
    }
  } catch (const Error& error) {
    formation.end(error.what());
  }
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
      case 2:
        form_group(reader);
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

std::vector<std::string> seeds() {
  const auto number = [](size_t value) { return std::string(1, static_cast<char>(value)); };
  std::vector<std::string> result;
  // Values of the store: as they are, and with an edit at each of some places.
  for (const char who : {'\x04', '\x05', '\x06', '\x09'}) {
    for (const char shape : {'\x00', '\x04', '\x07', '\x10', '\x14', '\x17', '\x30', '\x20'}) {
      const std::string head = {who, shape};
      result.push_back(head + std::string(8, '\0'));
      for (const size_t at : {0, 5, 20, 40, 80, 130, 140, 160}) {
        for (const char* comes : {"7", " ", "-", "\x1e", "more\x1f", "99999999999"}) {
          const std::string edit =
              "\x01" + number(at) + "\x01" + number(std::strlen(comes)) + comes;
          if ((at + static_cast<size_t>(shape)) % 3 == 0) {
            result.push_back(head + "\x01\x01" + edit + "\x01" + edit);
          }
        }
      }
      result.push_back(head + "\x01\x0f");
      result.push_back(head +
                       "\x01\x0e\x01\x05\x03\x05"
                       "1 99:");
      result.push_back(head + std::string("\x01\x0d\0\0\0\0\0\0", 8));
    }
  }
  // Messages to an endpoint.
  const auto join = [](int64_t uuid) {
    return MessageWriter(MessageKind::join).number(uuid).number(Digest{}).finished();
  };
  const auto find = MessageWriter(MessageKind::find).string("key").finished();
  const auto set = MessageWriter(MessageKind::set).string("key").string("value").finished();
  const auto append = MessageWriter(MessageKind::append).string("key").string("value").finished();
  const auto question = MessageWriter(MessageKind::question).number(int64_t{1}).finished();
  for (const std::string& first : {join(1), join(2), join(-1), std::string()}) {
    for (const std::string& then : {find, set + find, append + append + find, question}) {
      result.push_back(number(0) + first + then);
    }
  }
  result.push_back(number(0) + join(1) + std::string("\xff\xff\xff\xff", 4));
  result.push_back(number(0) + join(1) + std::string("\x05\0\0\0\x04\xff\xff\xff\xff", 9));
  // Answers to a member.
  const auto piece = [&](const std::string& text) { return number(text.size()) + text; };
  const auto value = [](uint8_t there, const std::string& text) {
    return MessageWriter(MessageKind::value).number(there).string(text).finished();
  };
  const auto answer = [](FormationState state) {
    return MessageWriter(MessageKind::answer)
        .number(state)
        .number(Digest{})
        .string("why")
        .finished();
  };
  result.push_back(
      "\x02"
      "aa" +
      piece(value(1, "text")) + piece(value(0, "")) + piece(answer(FormationState::failed)));
  result.push_back(
      "\x02"
      "aa" +
      piece(std::string("\0\0\0\0", 4)));
  result.push_back("\x02pq" + piece(value(1, "text")) + piece(answer(FormationState::formed)));
  result.push_back("\x02pq" + piece(value(0, "")) + piece(std::string(9, '\xff')));
  // Handles.
  const std::string handle = "pycomm-handle-2 0123456789abcdef 0123456789abcdef ";
  for (const char* rest : {"plain - 00ff 10.0.0.5:4711", "tls 00ff - [fd00::2]:4711,10.0.0.5:9",
                           "plain - - 1:1", "plain - 00ff 10.0.0.5:0", "plain - 00ff ,",
                           "tls - 00ff 10.0.0.5:99999", "plain 0 0 10.0.0.5:4711 more"}) {
    result.push_back("\x03" + handle + rest);
  }
  return result;
}
