// Group operations of the "pycomm" process group: making groups from others, waiting for all ranks,
// ending. A part of _c10d.
#include "binding/torch/backend.h"

namespace pycomm::torch_binding {

Backend::Backend(const std::shared_ptr<TorchStore>& store, int rank, int size,
                 intrusive_ptr<BackendOptions> options, const std::string& group,
                 const Parent& parent)
    : c10d::Backend(rank, size),
      arguments_{rank, size},
      store_(store->torch_store()),
      group_(group),
      options_(std::move(options)) {
  if (options_->enable_reconfigure) {
    open_ = std::make_shared<OpenGroup>(nullptr, nullptr);
    open_endpoint();
    return;
  }
  CommunicatorOptions communicator = communicator_options();
  communicator.group = group;
  for (const uint64_t r : options_->global_ranks_in_group) {
    communicator.global_ranks.push_back(static_cast<int>(r));
  }
  if (parent.engine) {
    communicator.parent = &parent.engine->comm();
    communicator.parent_ranks = parent.ranks;
  }
  open_ = std::make_shared<OpenGroup>(
      std::make_shared<Engine>(store, rank, size, communicator, options_->device, hooks_), store);
}

CommunicatorOptions Backend::communicator_options() const {
  CommunicatorOptions communicator = options_->communicator;
  communicator.timeout = unwrapped(options_->timeout);
  communicator.description = options_->group_desc;
  communicator.interrupt = &check_signals;
  if (options_->device.path == "mixed") communicator.agreed = "device_path=mixed";
  return communicator;
}

void Backend::raise_not_open() const {
  if (endpoint_ && !open_->ended())
    raise(arguments_.here() +
          "the process group has no members yet: it was made with enable_reconfigure; call "
          "reconfigure() with the handles of all ranks first");
  raise(arguments_.here() + "the process group is shut down");
}

/// The ranks do not keep the store alive: when its groups are gone, the port of its server must be
/// free.
void join_straggler_monitor(Backend& backend, const std::shared_ptr<OpenGroup>& group) {
  const auto locked = [weak = std::weak_ptr<OpenGroup>(group),
                       first = std::weak_ptr<Engine>(group->engine())] {
    const auto open = weak.lock();
    const auto engine = first.lock();
    // After reconfigure() there is another monitor for the new members.
    auto store = engine && open && open->engine() == engine ? open->store() : nullptr;
    if (store) return store;
    throw std::runtime_error("the store is gone");
  };
  const auto put = [locked](const std::string& key, const std::string& value) {
    const auto store = locked();
    const GilReleased release;
    store->set(key, value);
  };
  const auto look = [locked](const std::string& key) -> std::optional<std::string> {
    const auto store = locked();
    const GilReleased release;
    return store->find(key);
  };
  py::module_::import("pycomm.straggler.monitor")
      .attr("join")(backend.trace(), py::cpp_function(put), py::cpp_function(look));
}

namespace {

// A store outlives its groups, and values that an older group of this name left there must not be
// read by this one. So each rank counts its groups there. A group whose ranks are in another one
// already needs no round trip for that: the parent's name is unique, and all ranks of the group
// have made equally many groups of this name from that parent.
std::string unique_name(TorchStore& store, const std::string& name, int rank,
                        const Parent& parent) {
  if (parent.engine) {
    const std::string& group = parent.engine->group();
    return name + "/" + group + "." +
           std::to_string(parent.engine->count_child(name, parent.ranks));
  }
  const int64_t count = store.add(name + ": groups of rank " + std::to_string(rank), 1);
  return name + "/" + std::to_string(count);
}

}  // namespace

intrusive_ptr<Backend> Backend::make(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     intrusive_ptr<BackendOptions> options, const std::string& name,
                                     const Parent& parent) {
  const auto known =
      parent.engine ? parent.engine->store().round_trip() : std::chrono::microseconds(0);
  const auto requests = std::make_shared<TorchStore>(store, known);
  const bool later = options->enable_reconfigure;  // the store may not be that of all its members
  const std::string unique = later ? name : unique_name(*requests, name, rank, parent);
  auto backend =
      c10::make_intrusive<Backend>(requests, rank, size, std::move(options), unique, parent);
  OpenGroups::all().add(backend->open_);
  if (later) return backend;
  const GilAcquired gil;
  join_straggler_monitor(*backend, backend->open_);
  return backend;
}

// ------------------------------------------------------------------ groups from groups

Parent Backend::as_parent(const std::vector<int>& ranks) const {
  const bool ours =
      std::all_of(ranks.begin(), ranks.end(), [this](int r) { return r >= 0 && r < size_; });
  return ours ? Parent{open_->engine(), ranks} : Parent{};
}

/// Returns a copy of the caller's options, or of our own. Torch's default timeout means that the
/// caller named none, so ours applies.
intrusive_ptr<BackendOptions> Backend::options_for(const intrusive_ptr<Options>& given) const {
  const auto* ours = dynamic_cast<const BackendOptions*>(given.get());
  auto options = c10::make_intrusive<BackendOptions>(ours ? *ours : *options_);
  if (options->timeout == kBackendDefaultTimeout) options->timeout = options_->timeout;
  return options;
}

intrusive_ptr<Backend> Backend::made_from_this(const intrusive_ptr<c10d::Store>& store, int rank,
                                               int size, const intrusive_ptr<Options>& given,
                                               const Parent& parent) {
  const auto options = options_for(given);
  options->enable_reconfigure = false;  // its members are those of now
  const auto fresh = c10::static_intrusive_pointer_cast<Backend>(fresh_.lock());
  fresh_.reset();
  if (fresh && fresh->open_->engine() && fresh->options_->group_name == options->group_name) {
    return fresh;
  }
  auto made = with_python_errors(
      [&] { return make(store, rank, size, options, options->group_name, parent); });
  fresh_ = c10::weak_intrusive_ptr<c10d::Backend>(intrusive_ptr<c10d::Backend>(made));
  return made;
}

intrusive_ptr<c10d::Backend> Backend::split(const intrusive_ptr<c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const intrusive_ptr<Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  return made_from_this(store, static_cast<int>(mine - ranks.begin()),
                        static_cast<int>(ranks.size()), opts, as_parent(ranks));
}

intrusive_ptr<c10d::Backend> Backend::merge(const intrusive_ptr<c10d::Store>& store,
                                            const intrusive_ptr<Options>& opts, const int& rank,
                                            const int& size) {
  return made_from_this(store, rank, size, opts);
}

intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<int64_t>& ranks_to_exclude,
                                             int shrink_flags, const intrusive_ptr<Options>& opts) {
  constexpr int kAbort = 1;  // dist.SHRINK_ABORT
  if (shrink_flags & kAbort) abort();
  if (endpoint_)
    raise(arguments_.here() +
          "shrink: this group was made with enable_reconfigure; call reconfigure() with the "
          "handles of the ranks that stay");
  const auto options = options_for(opts);
  const auto old_ranks = options_->global_ranks_in_group;
  options->global_ranks_in_group.clear();
  options->group_name = group_ + "/shrunk without";
  int rank = -1, size = 0;
  std::vector<int> kept;
  for (int r = 0; r < size_; r++) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), r) != ranks_to_exclude.end()) {
      options->group_name += " " + std::to_string(r);
      continue;
    }
    if (r == rank_) rank = size;
    kept.push_back(r);
    // Torch names the ranks of all groups but the default one.
    options->global_ranks_in_group.push_back(old_ranks.empty() ? r : old_ranks[r]);
    size++;
  }
  if (rank < 0) raise(arguments_.here() + "shrink: this rank is one of those to exclude");
  return with_python_errors([&] {
    try {
      return make(store_, rank, size, options, options->group_name, as_parent(kept));
    } catch (const PeerLost& lost) {
      if (lost.rank < 0 || lost.rank >= size) throw;
      const int ours = kept[lost.rank];  // for the next call
      throw PeerLost(ours, std::string(lost.what()) + "; it is rank " + std::to_string(ours) +
                               " of the group that shrinks: exclude it, too");
    }
  });
}

// ------------------------------------------------------------------ waiting for all ranks

void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  // The barrier uses the store, not our own channels: it is for finding out why a group is stuck.
  const auto limit = unwrapped(opts.timeout < Milliseconds(0) ? options_->timeout : opts.timeout);
  const std::string in_time = " in " + std::to_string(limit.count()) + " ms";
  const auto engine = this->engine();
  const std::string key =
      engine->group() + "/monitored barrier " + std::to_string(++monitored_barriers_);
  const auto arrival_key = [&](int rank) { return key + "/" + std::to_string(rank); };
  const auto verdict = key + "/verdict";
  const std::string good = "all ranks arrived";
  const WithoutGil without_gil;
  const std::shared_ptr<Store> shared = open_->store();
  if (!shared) raise_not_open();
  Store& store = *shared;

  if (rank_ > 0) {
    store.set(arrival_key(rank_), "here");
    std::string text;
    try {
      // This wait is longer than rank 0's, which may have come after us, to receive its verdict.
      text = store.get(verdict, Deadline::after(limit + Milliseconds(2000)));
    } catch (const Timeout&) {
      text = "rank 0 did not come" + in_time;
    }
    if (text == good) return;
    raise<Timeout>(arguments_.here() + "Rank " + std::to_string(rank_) +
                   " successfully reached monitoredBarrier, but received errors while waiting for "
                   "send/recv from rank 0. Please check rank 0 logs for faulty rank. Original "
                   "exception: " +
                   text);
  }

  const Deadline deadline = Deadline::after(limit);
  std::string missing;
  int count = 0;
  for (int r = 1; r < size_ && (wait_all_ranks || count == 0); r++) {
    try {
      store.get(arrival_key(r), deadline);
    } catch (const Timeout&) {
      missing += (count++ ? ", " : "") + std::to_string(r);
    }
  }
  std::string text = good;
  if (limit.count() == 0 && size_ > 1) {
    text = "Rank 0 timed out in monitoredBarrier after 0 ms";
  } else if (count > 0) {
    text = (wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" +
           in_time;
  }
  store.set(verdict, text);
  if (text != good) raise<Timeout>(arguments_.here() + text);
}

// ------------------------------------------------------------------ state

void Backend::setTimeout(Milliseconds timeout) {
  options_->timeout = timeout;
  if (endpoint_ && !open_->engine()) return;  // it counts from the first reconfigure() on
  engine()->set_timeout(unwrapped(timeout));
}

c10d::ErrorType Backend::getError() { return open_->error(); }

void Backend::registerOnCompletionHook(Engine::Hook&& hook) {
  if (onCompletionHook_)
    raise(arguments_.here() + "the process group has a completion hook already");
  onCompletionHook_ = std::move(hook);
  if (endpoint_ && !open_->engine()) return;
  engine()->set_hook(onCompletionHook_);
}

// ------------------------------------------------------------------ ending

void Backend::abort() {
  if (const auto engine = open_->engine()) engine->abort("called abort()");
}

void Backend::shutdown() { open_->shutdown(); }

}  // namespace pycomm::torch_binding
