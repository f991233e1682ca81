// Sends and receives of a rank whose peer is in the group and says anything: the rank keeps to its
// memory and to what it may keep of the peer, a receive that is done holds one message, and what
// the peer says as it should arrives, or the group is over.
//
// Input: events. Rank 0 posts sends and receives; its peer is a bare transport, which says headers
// of a right form or of any bytes, and bytes behind them, and answers as it should or not.
#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "collectives/communicator.h"
#include "collectives/point_to_point/wire.h"
#include "tests/fuzz/target.h"
#include "transports/shm/transport.h"

namespace {

using pycomm::Communicator;
using pycomm::Lane;
using pycomm::Milliseconds;
using Header = pycomm::MessageHeader;
using Kind = Header::Kind;

constexpr uint64_t kSizes[] = {0, 1, 8, 32, 300, pycomm::kEagerBytes, pycomm::kEagerBytes + 1};
constexpr int kTags = 3, kOwn = 3, kLast = 4;  // of messages to ourselves, and of the last one
constexpr int kMostEvents = 100;
constexpr char kNext = '\x1e', kIs = '\x1f';  // of what a rank announces (rendezvous.cpp)
constexpr Milliseconds kTimeout{10000};

uint64_t size_by(uint8_t number) { return kSizes[number % std::size(kSizes)]; }

Header header_of(Kind kind, int64_t tag, uint64_t bytes, uint64_t place = 0) {
  Header header;
  header.kind = kind;
  header.tag = tag;
  header.bytes = bytes;
  header.place = place;
  return header;
}

/// Rank 1 of two: its end of the lane.
class Peer {
 public:
  explicit Peer(const std::shared_ptr<pycomm::Store>& store) {
    pycomm::Rendezvous rendezvous;
    rendezvous.store = store;
    rendezvous.group = "default";
    rendezvous.rank = 1;
    rendezvous.size = 2;
    rendezvous.deadline = pycomm::Deadline::after(kTimeout);
    const std::string word = store->get("default/here/0", rendezvous.deadline);
    store->set("default/here/1", word);
    // A communicator announces more with its first value, which a bare transport looks up.
    for (size_t end, at = word.find(kNext); at < word.size(); at = end) {
      end = std::min(word.find(kNext, at + 1), word.size());
      const size_t is = word.find(kIs, at);
      store->set("default/" + word.substr(at + 1, is - at - 1) + "/0",
                 word.substr(is + 1, end - is - 1));
    }
    transport_ = pycomm::ShmSetup().make(rendezvous, {0, 1});
    channel_ = &transport_->channel(0, Lane::point_to_point);
    listen();
  }

  void say(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    said_.emplace_back(from, from + bytes);
    channel_->send(pycomm::kLaneTag, {said_.back().data(), bytes});
  }
  void say(const Header& header) { say(&header, sizeof header); }
  /// A message of one value; each has another.
  void say_bytes(size_t bytes) {
    const std::vector<uint8_t> message(bytes, ++value_);
    say(message.data(), bytes);
  }
  /// Says bytes for the place of this tag (-1: of any) that rank 0 has told first, or more of them
  /// than fit.
  void answer(int64_t tag, uint64_t too_many = 0) {
    const auto place = std::find_if(places_.begin(), places_.end(), [&](const Header& ready) {
      return tag < 0 || ready.tag == tag;
    });
    if (place == places_.end()) return;
    const uint64_t bytes = place->bytes + too_many;
    say(header_of(Kind::payload, place->tag, bytes, place->place));
    if (bytes > 0) say_bytes(bytes);
    places_.erase(place);
  }

  /// Moves bytes both ways. False if rank 0 has ended the group.
  bool progress() {
    try {
      while (channel_->progress()) {
      }
      while (channel_->received() >= ticket_) hear();
    } catch (const pycomm::Error&) {
      return false;
    }
    return true;
  }
  uint64_t credit() const { return credit_; }

 private:
  void listen() {
    in_bytes_ = false;
    expect(&header_, sizeof header_);
  }
  void expect(void* data, size_t bytes) {
    ticket_ = channel_->recv(pycomm::kLaneTag, {static_cast<uint8_t*>(data), bytes});
  }
  void hear() {
    const bool bytes_follow = header_.kind == Kind::eager || header_.kind == Kind::payload;
    if (!in_bytes_ && bytes_follow && header_.bytes > 0) {
      heard_.resize(header_.bytes);
      in_bytes_ = true;
      return expect(heard_.data(), heard_.size());
    }
    if (header_.kind == Kind::ready) places_.push_back(header_);
    if (header_.kind == Kind::credit) credit_ += header_.bytes;
    if (header_.kind == Kind::offer && offers_++ % 2 == 0) {  // every other one gets its place
      say(header_of(Kind::ready, header_.tag, header_.bytes, offers_));
    }
    listen();
  }

  std::list<std::vector<uint8_t>> said_;
  std::list<Header> places_;
  std::vector<uint8_t> heard_;
  Header header_;
  std::unique_ptr<pycomm::Transport> transport_;  // ends before what it sends and receives
  pycomm::Channel* channel_ = nullptr;
  uint64_t ticket_ = 0, credit_ = 0, offers_ = 0;
  uint8_t value_ = 0;
  bool in_bytes_ = false;
};

/// Rank 0 and its peer.
class Pair {
 public:
  Pair() {
    const auto store = pycomm::make_local_store();
    pycomm::CommunicatorOptions options;
    options.transport = "shm";
    options.timeout = kTimeout;
    std::thread meets([&] { peer_ = std::make_unique<Peer>(store); });
    rank_ = std::make_unique<Communicator>(store, 0, 2, options);
    meets.join();
  }

  /// Returns or throws when the group is over, else at the end of the input.
  void run(Reader& reader) {
    for (int i = 0; i < kMostEvents && !reader.empty(); i++) {
      play(reader);
      if (!progress(2)) return;
    }
    end();
  }

  void check_receives() const {
    for (const Posted& posted : receives_) {
      if (!posted.request || !posted.request->done() || posted.data.empty()) continue;
      const uint8_t first = posted.data[0];
      require(std::all_of(posted.data.begin(), posted.data.end(),
                          [&](uint8_t value) { return value == first; }) ||
                  !as_it_should_,
              "a receive that is done holds one message");
    }
  }

 private:
  struct Posted {
    std::vector<uint8_t> data;  // of exactly its size, so that a byte too many is found
    std::shared_ptr<Communicator::Request> request;
  };

  void play(Reader& reader) {
    const uint8_t event = reader.byte(), tag = event / 8 % kTags, size = reader.byte();
    switch (event % 8) {
      case 0:
      case 1:
        return post_receive(tag, size_by(size), size >= 128);
      case 2:
        return post_send(tag, size_by(size));
      case 3:
        return say_eager(tag, size_by(size));
      case 4:  // many, as they would fill the bound
        for (int i = 0; i < size; i++) say_eager(tag, size_by(event / 8));
        return;
      case 5: {  // any header of a right form, without the bytes that may have to follow
        const auto kind = static_cast<Kind>(size % 6);
        as_it_should_ &= kind != Kind::eager && kind != Kind::payload;
        return peer_->say(header_of(kind, tag, size_by(reader.byte()), size / 6));
      }
      case 6: {
        const auto bytes = reader.take(size % 2 ? sizeof(Header) : size);
        as_it_should_ = false;
        return peer_->say(bytes.data(), bytes.size());
      }
      default:
        return peer_->answer(size % 2 ? -1 : tag, size < 250 ? 0 : 300);
    }
  }

  // Moves some of what can be moved. False if the group is over.
  bool progress(int rounds) {
    for (int i = 0; i < rounds; i++) {
      if (!peer_->progress()) return false;
      // A message to ourselves, since whoever posts also moves what is under way.
      const auto receive = rank_->recv(nullptr, 0, 0, kOwn);
      rank_->send(nullptr, 0, 0, kOwn)->wait();
      receive->wait();
    }
    return true;
  }

  // After a last message everything before it has been dealt with.
  void end() {
    post_receive(kLast, 8, false);
    const auto last = receives_.back().request;
    // Twice: bytes that the peer still owes would swallow the first.
    for (int i = 0; i < 2; i++) peer_->say(header_of(Kind::offer, kLast, 8));
    for (int i = 0; i < 1000 && !last->done(); i++) {
      if (!progress(1)) return;
      peer_->answer(kLast);
    }
    require(last->done(), "what is said as it should be arrives, or the group is over");
    if (as_it_should_) {
      require(eager_ <= pycomm::kKeptBytes + peer_->credit(),
              "no more is kept of a peer than the bound");
    }
  }

  void post_receive(int tag, uint64_t bytes, bool of_any) {
    receives_.push_back({std::vector<uint8_t>(bytes), nullptr});
    Posted& posted = receives_.back();
    posted.request = rank_->recv(posted.data.data(), bytes, of_any ? -1 : 1, tag);
  }
  void post_send(int tag, uint64_t bytes) {
    sends_.push_back({std::vector<uint8_t>(bytes), nullptr});
    Posted& posted = sends_.back();
    posted.request = rank_->send(posted.data.data(), bytes, 1, tag);
  }
  void say_eager(int tag, uint64_t bytes) {
    peer_->say(header_of(Kind::eager, tag, bytes));
    if (bytes > 0) peer_->say_bytes(bytes);
    eager_ += bytes + pycomm::kMessageCost;
  }

  std::list<Posted> sends_, receives_;
  std::unique_ptr<Peer> peer_;
  std::unique_ptr<Communicator> rank_;
  uint64_t eager_ = 0;        // what the peer has said, and its cost
  bool as_it_should_ = true;  // it has said headers of a right form, and the bytes they promise
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  Pair pair;
  try {
    pair.run(reader);
  } catch (const pycomm::Error&) {  // the group is over
  }
  pair.check_receives();
  return 0;
}
