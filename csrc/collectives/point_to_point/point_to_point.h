// PointToPoint: sends and receives between two ranks, matched by (peer, tag) in the order of
// posting, on a lane of its own.
//
// A short send travels at once, as a header and its bytes; what arrives before its receive is
// posted is kept until then. A long one, or one to a peer that keeps too much already, travels as
// an offer, and its bytes follow when the peer reports that it has a place for them. So no rank
// keeps more than a fixed number of bytes of each peer.
//
// The thread that waits moves the bytes; while requests are under way and no caller waits, a thread
// of the group does.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/common/transfer.h"
#include "collectives/group/channel_mesh.h"
#include "collectives/point_to_point/wire.h"
#include "core/fork_guard.h"

namespace pycomm {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  /// `over` is called with an error in flight that ends the group; afterwards there is a failure.
  PointToPoint(ChannelMesh& mesh, Failure& failure, Trace& trace, std::function<void()> over);

  /// `limit` is for waits without a timeout of their own.
  std::shared_ptr<Transfer> send(const void* data, size_t bytes, int dst, int tag,
                                 Milliseconds limit);
  std::shared_ptr<Transfer> recv(void* data, size_t bytes, int src, int tag, Milliseconds limit);
  /// Ends the thread. Requests that are not done stay so, and their waits throw; when this returns,
  /// no thread of a caller is on the mesh. May be called more than once, from any thread that is
  /// not in here.
  void close();
  /// Releases the requests, which hold this object in turn. Called when no transport uses them any
  /// more.
  void forget();

 private:
  static constexpr Lane kLane = Lane::point_to_point;
  using Lock = std::unique_lock<std::mutex>;
  class Request;
  using RequestPtr = std::shared_ptr<Request>;
  using Header = MessageHeader;
  using Kind = MessageHeader::Kind;

  /// A message that arrived before its receive was posted.
  struct Unexpected {
    int peer;
    Header header;
    std::vector<uint8_t> data;  ///< none for an offer
    bool complete = false;
    RequestPtr claimed = nullptr;  ///< a receive that was posted while it arrived
  };
  /// A header that belongs to no request.
  struct Note {
    Header header;
    uint64_t ticket = 0;
  };
  struct Peer {
    std::deque<RequestPtr> sends;           ///< under way, in order
    std::list<RequestPtr> offered;          ///< sends that wait for a place, in order
    std::list<Header> ready;                ///< places that wait for a send, in order
    std::map<uint64_t, RequestPtr> places;  ///< receives that are ready, by place
    std::deque<Note> notes;                 ///< under way, in order
    uint64_t last_place = 0;
    uint64_t eager_bytes = 0;  ///< that we have sent and that have no credit yet
    uint64_t kept = 0;         ///< that it has sent and for which we have given no credit
    uint64_t credit = 0;       ///< of these, the bytes that we have not reported yet
    bool listening = false;    ///< a receive for a header or for bytes is posted
    Header header;
    uint64_t ticket = 0;                         ///< of that receive
    RequestPtr target = nullptr;                 ///< the receive whose bytes are arriving,
    std::list<Unexpected>::iterator unexpected;  ///< or where they are kept if there is none
    bool in_payload = false;
    std::exception_ptr lost = nullptr;
  };

  std::shared_ptr<Transfer> post(const RequestPtr& request);

  // All of these run with the lock held.
  void enter(Lock& lock);
  [[noreturn]] void end_in(const Request& request);
  void post_send(const RequestPtr& request);
  void post_recv(const RequestPtr& request);
  void listen(int peer);
  void send_bytes(const RequestPtr& request, Kind kind, uint64_t place);
  void send_note(int peer, const Header& header);
  void make_ready(int peer, const RequestPtr& request);
  void give_credit(int peer, uint64_t bytes);
  bool step();
  bool settle(int peer);
  void on_header(int peer);
  void check_eager(int peer);
  [[noreturn]] void throw_protocol_error(int peer, const std::string& what) const;
  void on_ready(int peer);
  void on_message(int peer);
  void on_payload(int peer);
  void finish(const RequestPtr& request, int source, std::exception_ptr error = nullptr);
  void lose(int peer, const std::exception_ptr& error);
  void look_for_failures();
  void sleep_unlocked(Lock& lock, const std::function<void()>& how);
  void wake_server();

  /// Releases what finished requests have kept, without the lock: its destructors may run anything.
  class UnlockingGuard;
  void release_unneeded(Lock& lock);
  void check_open(const Request& request) const;

  void wait(Request& request, Milliseconds limit);
  void drive(Lock& lock, const Request& request, Milliseconds limit);
  void serve();

  const ForkGuard fork_{};
  ChannelMesh& mesh_;
  const int rank_;  // requests may be queried after the mesh is gone
  Failure& failure_;
  Trace& trace_;
  const std::function<void()> over_;

  std::mutex mutex_;
  std::condition_variable changed_;  ///< a sleep has ended, or a request is done
  std::condition_variable server_;   ///< wakes the thread
  std::vector<Peer> peers_;
  std::vector<int> active_;           ///< peers with which we have talked
  std::list<RequestPtr> posted_;      ///< receives without a message, in order of posting
  std::list<Unexpected> unexpected_;  ///< messages without a receive, in order of arrival
  std::vector<std::shared_ptr<void>> unneeded_;  ///< what finished requests have kept
  std::thread thread_;
  std::vector<OpTag> shown_;  ///< what threads in wait() wait for; peers see the last
  int outstanding_ = 0;       ///< requests that are not done
  int waiting_ = 0;           ///< threads in wait()
  int entering_ = 0;          ///< threads that want the mesh while another sleeps on it
  bool sleeping_ = false;     ///< a thread sleeps on the mesh without the lock
  bool serving_ = false;      ///< our thread is awake
  bool closed_ = false;
  std::mutex closing_;  ///< one thread joins ours
};

}  // namespace pycomm
