// Sends and receives between two ranks, matched by (peer, tag) in the order of posting, on a lane
// of its own.
//
// A send travels as a header and then its bytes. What arrives before its receive is posted is kept
// until then. Bytes are moved by the thread that waits; while requests are under way and nobody
// waits, by a thread of the group.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/mesh.h"

namespace pycomm {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  /// `over` is called with an error that ends the group, and throws the group's first error.
  PointToPoint(Mesh& mesh, Failure& failure, Trace& trace, std::function<void()> over);

  /// `limit` is for waits that name none.
  std::shared_ptr<Communicator::Request> send(const void* data, size_t bytes, int dst, int tag,
                                              Milliseconds limit);
  std::shared_ptr<Communicator::Request> recv(void* data, size_t bytes, int src, int tag,
                                              Milliseconds limit);
  /// Ends the thread. Requests that are not done stay so, and their waits throw.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  class Request;
  using RequestPtr = std::shared_ptr<Request>;

  struct Header {
    uint64_t bytes = 0;
    int64_t tag = 0;
  };
  /// A message that came before its receive.
  struct Unexpected {
    int peer;
    int64_t tag;
    std::vector<uint8_t> data;
    bool complete = false;
    RequestPtr claimed = nullptr;  ///< a receive that was posted while it was coming in
  };
  struct Peer {
    std::deque<RequestPtr> sends;  ///< under way, in order
    bool listening = false;        ///< a receive for a header or for bytes is posted
    Header header;
    uint64_t ticket = 0;                         ///< of that receive
    RequestPtr target = nullptr;                 ///< whose bytes are coming in,
    std::list<Unexpected>::iterator unexpected;  ///< or where they are kept if there is none
    bool in_payload = false;
    std::exception_ptr lost = nullptr;
  };

  // All of these run with the lock held.
  void enter(Lock& lock);
  void post_send(const RequestPtr& request);
  void post_recv(const RequestPtr& request);
  void listen(int peer);
  bool step();
  bool settle(int peer);
  void on_header(int peer);
  void on_payload(int peer);
  void finish(const RequestPtr& request, int source, std::exception_ptr error = nullptr);
  void lose(int peer, const std::exception_ptr& error);
  void look_for_failures();
  void rest(Lock& lock, const std::function<void()>& how);
  void wake_server();

  void wait(Request& request, Milliseconds limit);
  void drive(Lock& lock, const Request& request, Milliseconds limit);
  void serve();

  Mesh& mesh_;
  Failure& failure_;
  Trace& trace_;
  const std::function<void()> over_;

  std::mutex mutex_;
  std::condition_variable changed_;  ///< a rest has ended, or a request is done
  std::condition_variable server_;   ///< wakes the thread
  std::vector<Peer> peers_;
  std::vector<int> active_;           ///< peers with which we have talked
  std::list<RequestPtr> posted_;      ///< receives without a message, in order of posting
  std::list<Unexpected> unexpected_;  ///< messages without a receive, in order of arrival
  std::thread thread_;
  int outstanding_ = 0;   ///< requests that are not done
  int waiting_ = 0;       ///< threads in wait()
  int entering_ = 0;      ///< threads that want the mesh while another rests on it
  bool resting_ = false;  ///< a thread sleeps on the mesh without the lock
  bool serving_ = false;  ///< our thread is awake
  bool closed_ = false;
};

}  // namespace pycomm
