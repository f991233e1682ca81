// Reconfiguration of the "pycomm" process group: handles, and new members in place. A part of
// _c10d.
#include "binding/torch/backend.h"

namespace pycomm::torch_binding {
namespace {

// Operations of the former group may take this long to end before they are aborted: those of ranks
// that are all alive do, and others would take until their deadline.
constexpr Milliseconds kGrace(2000);

/// The group whose members form another one, as their source of knowledge of who has died. That it
/// had an error itself does not matter any more.
class FormerGroup final : public ParentGroup {
 public:
  explicit FormerGroup(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  int size() const override { return engine_->comm().size(); }
  std::exception_ptr over() const override { return nullptr; }
  bool lost(int rank) const override { return engine_->comm().lost(rank); }
  bool uses_network() const override { return engine_->comm().uses_network(); }

 private:
  const std::shared_ptr<Engine> engine_;
};

/// Returns the place of each handle in the former list; nothing if one was not there.
std::vector<int> places(const std::vector<std::string>& handles,
                        const std::vector<std::string>& former) {
  std::vector<int> ranks;
  for (const std::string& handle : handles) {
    const auto found = std::find(former.begin(), former.end(), handle);
    if (found == former.end()) return {};
    ranks.push_back(static_cast<int>(found - former.begin()));
  }
  return ranks;
}

}  // namespace

void Backend::open_endpoint() {
  endpoint_ = std::make_unique<tcp::Endpoint>(group_, TcpOptions(communicator_options()));
}

std::string Backend::handle() const {
  if (!endpoint_)
    raise(arguments_.here() +
          "the process group cannot be reconfigured; make it with enable_reconfigure=True");
  return endpoint_->handle().text();
}

bool Backend::is_gone(const std::string& handle) const {
  const WithoutGil without_gil;
  return with_python_errors([&] {
    const tcp::Handle parsed = tcp::Handle::parse(handle);
    return tcp::is_gone(parsed, communicator_options().secret, &check_signals);
  });
}

void Backend::form(int64_t uuid, const std::vector<std::string>& handles, Milliseconds timeout) {
  handle();  // raises in a group that has none
  const WithoutGil without_gil;
  with_python_errors([&] {
    open_->check_process(arguments_.here() + "reconfigure");
    const std::unique_lock<std::mutex> alone(forming_, std::try_to_lock);
    if (!alone.owns_lock())
      throw Error(arguments_.here() + "reconfigure: another thread reconfigures this group now");
    if (open_->ended()) raise_not_open();
    const auto former = open_->engine();
    if (former && former->runs_here())
      throw Error(arguments_.here() +
                  "reconfigure: this is a callback of an operation of the group, which must end "
                  "first; call it from another thread");
    CommunicatorOptions communicator = communicator_options();
    const Milliseconds limit = timeout.count() > 0 ? unwrapped(timeout) : communicator.timeout;
    tcp::Gathering gathering(*endpoint_, uuid, handles, communicator.secret, limit, &check_signals);
    try {
      form(gathering, uuid, handles, communicator, limit, former);
      gathering.end();
    } catch (const std::exception& error) {
      gathering.end(error.what());
      throw;
    }
  });
  const GilAcquired gil;
  join_straggler_monitor(*this, open_);
}

void Backend::form(tcp::Gathering& gathering, int64_t uuid, const std::vector<std::string>& handles,
                   CommunicatorOptions communicator, Milliseconds limit,
                   const std::shared_ptr<Engine>& former) {
  if (former)
    former->finish_within(std::min(kGrace, limit / 4), "reconfigures the group in the middle");
  const int rank = gathering.rank(), size = gathering.size();
  const auto store = size > 1 ? gathering.store() : nullptr;
  communicator.group = group_ + "/members " + std::to_string(uuid);
  communicator.timeout = limit;
  if (former) communicator.kept_heaps = former->comm().kept_heaps();
  communicator.interrupt = [&] {
    check_signals();
    gathering.look_for_absent();
  };
  std::optional<FormerGroup> parent;
  communicator.parent_ranks = places(handles, handles_);
  if (former && !communicator.parent_ranks.empty()) {
    parent.emplace(former);
    communicator.parent = &*parent;
  } else {
    communicator.parent_ranks.clear();
  }
  auto engine = std::make_shared<Engine>(store, rank, size, communicator, options_->device, hooks_);
  engine->set_timeout(unwrapped(options_->timeout));
  if (onCompletionHook_) engine->set_hook(onCompletionHook_);
  if (!open_->replace(std::move(engine), store)) raise_not_open();
  handles_ = handles;
  ++formed_;
  arguments_ = {rank, size};
  monitored_barriers_ = 0;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  rank_ = rank;
  size_ = size;
#else
  const_cast<int&>(rank_) = rank;  // see set_shape_of()
  const_cast<int&>(size_) = size;
#endif
}

void Backend::set_shape_of(c10d::ProcessGroup& group) const {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  static_cast<void>(group);  // it asks its backend
#else
  // Torch 2.14 removed the const of these members of a backend, and lets the group ask its backend,
  // so that they may change. Older versions read them from memory at each call of getRank() and
  // getSize(), which their library compiles for any object, so a write is seen.
  struct Shape : c10d::ProcessGroup {
    static void set(c10d::ProcessGroup& group, int rank, int size) {
      const_cast<int&>(group.*(&Shape::rank_)) = rank;
      const_cast<int&>(group.*(&Shape::size_)) = size;
    }
  };
  Shape::set(group, rank_, size_);
#endif
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
intrusive_ptr<c10d::Work> Backend::reconfigure(const c10d::ReconfigureOptions& opts) {
  std::vector<std::string> handles;
  if (const auto* list = std::get_if<std::vector<std::string>>(&opts.handles)) {
    handles = *list;
  } else {  // ranks are ours to choose
    const auto& set = std::get<std::unordered_set<std::string>>(opts.handles);
    handles.assign(set.begin(), set.end());
    std::sort(handles.begin(), handles.end());
  }
  form(opts.uuid, handles, opts.timeout.value_or(Milliseconds(0)));
  c10d::BarrierOptions none;
  const Call call("pycomm:reconfigure", OpType::BARRIER, none);
  auto work = c10::make_intrusive<Work>(rank_, call, 0, Tensors());
  work->complete();
  return work;
}
#endif

}  // namespace pycomm::torch_binding
