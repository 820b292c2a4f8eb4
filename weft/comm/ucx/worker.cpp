#include "weft/comm/ucx/worker.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sched.h>
#include <ucs/debug/debug.h>

#include <csignal>
#include <cstdlib>
#include <deque>
#include <memory>

#include "weft/comm/ucx/devices.h"

namespace weft::comm::ucx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kShutdownTimeout{200};  // of the flush, and of closing the endpoints

void check(ucs_status_t status, const char* what) {
  if (status == UCS_OK) return;
  C10_THROW_ERROR(DistNetworkError, c10::str("UCX could not ", what, ": ", ucs_status_string(status),
                                             ". Set UCX_LOG_LEVEL=info for details; UCX_NET_DEVICES and UCX_TLS select "
                                             "devices and transports."));
}

using Config = std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)>;

/// Sets an option unless the environment does.
void set_default(ucp_config_t* config, const char* name, const char* value) {
  if (std::getenv((std::string("UCX_") + name).c_str())) return;
  const auto what = c10::str("set UCX_", name, "=", value);
  check(ucp_config_modify(config, name, value), what.c_str());
}

/// UCX_* environment variables take precedence. Defaults: no shared memory, which would bypass network namespaces and
/// would not detect dead peers; listeners only on `devices`. Over sockets no UCX rendezvous protocol: with error
/// handling UCX copies the data in any case, and an eager send needs no reply from a peer that is computing.
Config configuration(const std::string& devices) {
  ucp_config_t* read = nullptr;
  check(ucp_config_read(nullptr, nullptr, &read), "read its configuration");
  Config config(read, ucp_config_release);
  set_default(read, "TLS", "^sm");
  set_default(read, "NET_DEVICES", devices.c_str());
  if (!rdma_ports().empty()) return config;
  set_default(read, "RNDV_THRESH", "inf");
  return config;
}

/// UCX installs handlers for crash signals when it is loaded. Removes them, unless UCX_HANDLE_ERRORS is set.
void restore_signal_handlers() {
  static const bool once = [] {
    if (!std::getenv("UCX_HANDLE_ERRORS"))
      for (const int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) ucs_debug_disable_signal(number);
    return true;
  }();
  static_cast<void>(once);
}

void complete_transfer(Transfer& transfer, ucs_status_t status, size_t bytes) {
  transfer.request = nullptr;
  if (status == UCS_OK && bytes != transfer.bytes) status = UCS_ERR_MESSAGE_TRUNCATED;
  transfer.status = status;
  transfer.state = status == UCS_OK ? Transfer::State::done : Transfer::State::failed;
}

void on_sent(void* request, ucs_status_t status, void* transfer) {
  auto& done = *static_cast<Transfer*>(transfer);
  complete_transfer(done, status, done.bytes);
  ucp_request_free(request);
}

void on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* transfer) {
  complete_transfer(*static_cast<Transfer*>(transfer), status, info->length);
  ucp_request_free(request);
}

ucp_context_h make_context(int peers, const std::string& devices) {
  restore_signal_handlers();
  const Config config = configuration(devices);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  params.estimated_num_eps = peers;
  ucp_context_h context = nullptr;
  check(ucp_init(&params, config.get(), &context), "initialize");
  return context;
}

ucp_worker_h make_worker(ucp_context_h context) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucp_worker_h worker = nullptr;
  check(ucp_worker_create(context, &params, &worker), "create a worker");
  return worker;
}

}  // namespace

Worker::Worker(int peers, const std::string& devices)
    : context_(make_context(peers, devices), ucp_cleanup),
      worker_(make_worker(context_.get()), ucp_worker_destroy),
      connections_(peers) {
  check(ucp_worker_get_efd(worker_.get(), &event_), "create an event descriptor");
}

Worker::~Worker() {
  std::vector<ucs_status_ptr_t> requests;
  ucp_request_param_t default_params{};
  for (const auto& c : connections_) {
    if (flush_ && c.endpoint && c.status == UCS_OK) requests.push_back(ucp_ep_flush_nbx(c.endpoint, &default_params));
  }
  finish_requests(requests, kShutdownTimeout);
  ucp_request_param_t force{};
  force.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  force.flags = UCP_EP_CLOSE_FLAG_FORCE;
  requests.clear();
  for (const auto& c : connections_) {
    if (c.endpoint) requests.push_back(ucp_ep_close_nbx(c.endpoint, &force));
  }
  finish_requests(requests, kShutdownTimeout);
  drain();
}

void Worker::drain() {
  std::deque<std::vector<char>> messages;  // must outlive the worker: a receive may be incomplete
  ucp_tag_recv_info_t info{};
  while (auto* const message = ucp_tag_probe_nb(worker_.get(), 0, 0, /*remove=*/1, &info)) {
    auto& bytes = messages.emplace_back(info.length + 1);
    ucp_request_param_t default_params{};
    auto* const request = ucp_tag_msg_recv_nbx(worker_.get(), bytes.data(), info.length, message, &default_params);
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
  }
  worker_.reset();
}

void Worker::finish_requests(const std::vector<ucs_status_ptr_t>& requests, milliseconds max_wait) {
  const auto deadline = Clock::now() + max_wait;
  for (auto* request : requests) {
    if (!UCS_PTR_IS_PTR(request)) continue;  // completed immediately
    while (ucp_request_check_status(request) == UCS_INPROGRESS && Clock::now() < deadline) {
      if (!progress()) sleep(milliseconds(1));
    }
    ucp_request_free(request);
  }
}

std::string Worker::address() const {
  ucp_address_t* address = nullptr;
  size_t length = 0;
  check(ucp_worker_get_address(worker_.get(), &address, &length), "get its address");
  std::string bytes(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_.get(), address);
  return bytes;
}

void Worker::connect(int peer, const std::string& address) {
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.arg = &connections_[peer];
  params.err_handler.cb = [](void* connection, ucp_ep_h, ucs_status_t status) {
    auto& broken = *static_cast<Connection*>(connection);
    broken.status = status;
    broken.broke_at = Clock::now();
  };
  check(ucp_ep_create(worker_.get(), &params, &connections_[peer].endpoint), "connect to a peer");
}

void Worker::send(int peer, uint64_t tag, const void* data, size_t bytes, Transfer& transfer) {
  transfer = {.state = Transfer::State::pending, .bytes = bytes};
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.send = on_sent;
  params.user_data = &transfer;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  auto* const request = ucp_tag_send_nbx(connections_[peer].endpoint, data, bytes, tag, &params);
  if (!UCS_PTR_IS_PTR(request))
    complete_transfer(transfer, UCS_PTR_STATUS(request), bytes);  // completed immediately: UCX does not call `on_sent`
}

void Worker::receive(uint64_t tag, void* data, size_t bytes, Transfer& transfer) {
  transfer = {.state = Transfer::State::pending, .bytes = bytes};
  ucp_request_param_t params{};
  // NO_IMM_CMPL: only `on_received` gets the length of the message.
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                        UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  params.cb.recv = on_received;
  params.user_data = &transfer;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  auto* const request = ucp_tag_recv_nbx(worker_.get(), data, bytes, tag, ~uint64_t{0}, &params);
  if (UCS_PTR_IS_ERR(request)) complete_transfer(transfer, UCS_PTR_STATUS(request), bytes);
  if (transfer.state == Transfer::State::pending) transfer.request = request;
}

void Worker::cancel_receive(Transfer& transfer) {
  if (transfer.state == Transfer::State::pending && transfer.request)
    ucp_request_cancel(worker_.get(), transfer.request);
}

void Worker::sleep(milliseconds max_wait) {
  if (ucp_worker_arm(worker_.get()) != UCS_OK) {  // there is something to progress, or a thread of UCX is busy
    sched_yield();
    return;
  }
  pollfd event{.fd = event_, .events = POLLIN, .revents = 0};
  poll(&event, 1, static_cast<int>(max_wait.count()));
}

}  // namespace weft::comm::ucx
