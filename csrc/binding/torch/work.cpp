// What works ask of their engine, whose header includes theirs. A part of _c10d.
#include "binding/torch/work.h"

#include "binding/torch/engine.h"

namespace pycomm::torch_binding {

std::string Work::describe_ranks() const {
  const auto engine = engine_.lock();
  const WithoutGil without_gil;  // it may take a moment
  return engine ? engine->comm().describe_ranks() : "";
}

void Work::end_group(const Interrupted& interrupted) {
  if (const auto engine = engine_.lock())
    engine->abort("was interrupted while it waited for " + std::string(name_) + " #" +
                  std::to_string(seq_) + ": " + interrupted.what());
  std::rethrow_exception(interrupted.cause);
}

Milliseconds Work::limit_in_callback(Milliseconds timeout) {
  const auto engine = engine_.lock();
  if (!engine || c10d::Work::isCompleted()) return timeout;
  if (engine->runs_here()) {
    // Other ranks may have completed it, and would go on alone.
    engine->abort("waited for " + std::string(name_) + " #" + std::to_string(seq_) +
                  " in a callback on the thread that would complete it");
    raise(describe() +
          " cannot be waited for here: this is a callback on the thread that would complete it; "
          "wait outside of the callback, or chain it with then()");
  }
  return timeout.count() > 0 ? timeout : engine->comm().timeout();
}

void Work::abort() {
  const auto engine = engine_.lock();
  if (engine && !isCompleted()) engine->abort("aborted its " + std::string(name_));
}

// ------------------------------------------------------------------ sends and receives

bool PeerWork::wait(Milliseconds timeout) {
  try {
    ending_group_if_interrupted([&] {
      request_->wait(timeout);
      return true;
    });
  } catch (...) {
    if (const auto engine = engine_.lock()) engine->note(std::current_exception());
    leave_with(std::current_exception());
  }
  settle();
  // Another thread may be about to complete it: no queued operation has to run for that.
  return ending_group_if_interrupted([this] { return wait_until_complete(); });
}

void PeerWork::settle() {
  if (settled_.exchange(true)) return;
  const auto engine = engine_.lock();
  std::exception_ptr error, interrupted;
  try {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    request_->wait();
    if (opType_ != OpType::SEND) finish();
  } catch (const Interrupted& e) {
    interrupted = std::current_exception();
    error = std::make_exception_ptr(
        Error(describe() + ": the wait for it was interrupted: " + e.what()));
    if (engine) engine->note(error);
  } catch (...) {
    error = std::current_exception();
    if (engine) engine->note(error);
  }
  flat_.reset();
  if (error && InterpreterEnd::has_begun()) return;  // threads that wait in torch stay there
  end(error);
  if (interrupted) std::rethrow_exception(interrupted);
}

intrusive_ptr<Future> PeerWork::ended() {
  if (!isCompleted()) {
    if (const auto engine = engine_.lock())
      engine->settle_later(intrusive_ptr<PeerWork>::unsafe_reclaim_from_nonowning(this));
  }
  return Work::ended();
}

void DevicePeerWork::finish() {
  const auto engine = engine_.lock();
  if (!engine) throw Error(describe() + ": the process group is shut down");
  engine->deliver_peer(mirror_, *delivery_.done());
}

}  // namespace pycomm::torch_binding
