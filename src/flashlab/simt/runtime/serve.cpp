// The process in which a module runs, and its talk with Python (process.py).
//
// Python sends a call: which entry, what values, where the arrays lie in a file of shared memory. The entry
// runs in a thread of its own; this thread waits for its end, or for Python to cancel it. What comes back:
//
//   ending     how the entry ended; sent first, and from memory that is there, since the heap may be destroyed
//   returned   its value; the CUDA error that is left
//   records    of the launches, findings: see report.cpp and findings.cpp
//
// After an end other than a return the process ends too: nothing is known of its state.
#include "faults.h"
#include "global_shadow.h"
#include "host_part.h"
#include "report.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

namespace simt {

Progress* progress;
static Progress nowhere;
static int python;        // the socket
static int events[2];     // a pipe: the entry has ended
static void* module;      // dlopen's handle

// ---- frames: 8 bytes of length, then the text ---------------------------------------------------
static bool send_all(const void* data, size_t bytes) {
    for (const char* at = (const char*)data; bytes;) {
        const ssize_t n = send(python, at, bytes, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n, bytes -= (size_t)n;
    }
    return true;
}
static void send_frame(const char* name, const char* data, size_t bytes) {
    char head[64];
    const uint64_t length = (uint64_t)snprintf(head + 8, sizeof head - 8, "%s\n", name) + bytes;
    memcpy(head, &length, 8);
    if (!send_all(head, 8 + length - bytes) || !send_all(data, bytes)) end_process(1);
}
static void receive(void* data, size_t bytes, int* file) {
    for (char* at = (char*)data; bytes;) {
        iovec part = {at, bytes};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
        msghdr message{};
        message.msg_iov = &part, message.msg_iovlen = 1;
        message.msg_control = control, message.msg_controllen = sizeof control;
        const ssize_t n = recvmsg(python, &message, MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) end_process(0);  // Python is gone
        cmsghdr* c = CMSG_FIRSTHDR(&message);
        if (file && c && c->cmsg_type == SCM_RIGHTS) memcpy(file, CMSG_DATA(c), sizeof(int));
        at += n, bytes -= (size_t)n;
    }
}
static std::string receive_frame(int* file) {
    uint64_t length;
    receive(&length, 8, file);
    std::string text(length, 0);
    receive(&text[0], length, file);
    return text;
}

// ---- what came of it ----------------------------------------------------------------------------
static void send_ending() {
    static char line[2048];
    int n = snprintf(line, sizeof line, "%s\t%d\t%d\t%d\t%lu\t", ending.kind, ending.code, ending.host, ending.stack,
                     (unsigned long)ending.address);
    for (int i = 0; i < ending.count; i++)
        n += snprintf(line + n, sizeof line - (size_t)n, "%lu ",
                      (unsigned long)(in_module(ending.pcs[i]) ? ending.pcs[i] - module_base : 0));
    n += snprintf(line + n, sizeof line - (size_t)n, "\t");
    for (const char* c = ending.text; *c && n + 1 < (int)sizeof line; c++)
        line[n++] = *c == '\t' || *c == '\n' ? ' ' : *c;
    send_frame("ending", line, (size_t)n);
}
static void send_report(uint64_t returned) {
    const std::string values = std::to_string(returned) + '\t' + std::to_string(simt_last_error(0));
    send_frame("returned", values.data(), values.size());
    std::string text = records_text();
    send_frame("records", text.data(), text.size());
    text = findings_text();
    send_frame("findings", text.data(), text.size());
    send_frame("end", "", 0);
}

// ---- a call -------------------------------------------------------------------------------------
// Words and whole numbers of a text. (std::istringstream would bring all of C++'s locales into each library.)
class Words {
public:
    explicit Words(const std::string& text) : at(text.c_str()) {}
    Words& operator>>(std::string& word) {
        at += strspn(at, " \n");
        const size_t length = strcspn(at, " \n");
        word.assign(at, length);
        at += length, more = length > 0;
        return *this;
    }
    template <class T>
    Words& operator>>(T& number) {
        char* end;
        number = (T)strtoull(at, &end, 10);
        at = end;
        return *this;
    }
    explicit operator bool() const { return more; }

private:
    const char* at;
    bool more = true;
};

struct Mapping {
    char* base = nullptr;
    size_t bytes = 0;
    ~Mapping() {
        progress = &nowhere;
        if (base) munmap(base, bytes);
        if (progress_page) munmap(progress_page, PAGE);
    }
    void* progress_page = nullptr;
};

// Waits for the end of the call; Python may cancel it meanwhile.
static void wait_for_end() {
    int reason = 0, waited = 0;  // milliseconds since it was cancelled
    for (;;) {
        pollfd wanted[2] = {{events[0], POLLIN, 0}, {python, POLLIN, 0}};
        const int n = poll(wanted, 2, reason ? 10 : -1);
        if (n < 0) continue;
        if (wanted[0].revents) {
            char byte;
            while (read(events[0], &byte, 1) < 0 && errno == EINTR) {}
            return;
        }
        if (wanted[1].revents) {
            char byte;
            receive(&byte, 1, nullptr);
            reason = byte;
        }
        if (!reason) continue;
        cancel(reason);
        waited += 10;
        if (waited >= 500 && waited % 500 == 0) interrupt_call();  // it is not in a kernel
    }
}

static void serve_call(const std::string& text, int file) {
    Words in(text);
    std::string word, kinds;
    std::vector<uint64_t> words;
    Mapping mapping;
    Call call{};
    std::string problem;
    forget_run();
    cancel(0);
    settings.stream = nullptr;
    const int page = getpagesize();
    mapping.progress_page = mmap(nullptr, (size_t)page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    progress = mapping.progress_page == MAP_FAILED ? &nowhere : (Progress*)mapping.progress_page;
    if (mapping.progress_page == MAP_FAILED) mapping.progress_page = nullptr;
    while (in >> word) {
        if (word == "call") {
            in >> word;
            call.function = dlsym(module, word.c_str());
        } else if (word == "settings") {
            in >> settings.threads >> settings.shared_limit >> settings.multiprocessors >> settings.checked >>
                settings.timeline;
        } else if (word == "memory") {
            in >> mapping.bytes;
            void* p = mmap(nullptr, mapping.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) problem = "memory";
            else mapping.base = (char*)p;
        } else if (word == "piece") {
            size_t from, bytes, at;
            in >> from >> bytes >> at;
            if (mapping.base && mmap(mapping.base + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                                     (off_t)from) == MAP_FAILED)
                problem = "memory";
        } else if (word == "buffer") {
            uint64_t at, bytes;
            int writable, empty, item, number;
            in >> at >> bytes >> writable >> empty >> item >> number;
            const uintptr_t low = (uintptr_t)mapping.base + at;
            buffers.push_back({low, low + bytes, writable != 0, number});
            if (writable && settings.checked) global_shadow.add(low, low + bytes, number, item, empty != 0);
        } else if (word == "array") {  // of the call's arguments, the address of some
            uint64_t at;
            in >> at;
            words.push_back((uint64_t)mapping.base + at), kinds += 'i';
        } else if (word == "i" || word == "f") {
            uint64_t value;
            in >> value;
            words.push_back(value), kinds += word;
        } else if (word == "stream") {  // an address, and nothing is there: it is only handed on
            static const char current = 0;
            settings.stream = &current;
            words.push_back((uint64_t)&current), kinds += 'i';
        } else if (word == "float") {
            call.returns_float = true;
        }
    }
    close(file);
    if (!problem.empty() || !call.function) {
        send_frame("refused", problem.data(), problem.size());
        return;
    }
    call.words = words.data(), call.kinds = kinds.data(), call.count = (int)words.size();
    install_handlers();
    find_module();
    if (settings.checked)
        for (auto& variables : module_variables()) global_shadow.add(variables.first, variables.second, -1, 4, false);
    if (!begin_call(call, events[1])) {
        send_frame("refused", "threads", 7);
        return;
    }
    wait_for_end();
    const bool returned = !strcmp(ending.kind, "returned");
    if (returned) finish_call(), fflush(nullptr);
    send_ending();
    send_report(call.returned);
    if (!returned) end_process(0);
    release_stacks();
    global_shadow.clear();
}

static void describe(const std::string& text) {  // the module: what Python knows of it
    Words in(text);
    std::string word;
    while (in >> word) {
        if (word == "array") {
            StaticArray a;
            in >> a.offset >> a.bytes >> a.kernel;
            static_arrays.push_back(a);
        }
        if (word == "dynamic") in >> dynamic_shift;
    }
}

extern "C" int simt_serve(void* library, int socket) {
    module = library;
    dynamic_shared = (char* (*)())dlsym(module, "simt_module");
    python = socket;
    progress = &nowhere;
    signal(SIGINT, SIG_IGN);  // Ctrl-C is for Python, which then cancels the call
    signal(SIGPIPE, SIG_IGN);
    const rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    const int score = open("/proc/self/oom_score_adj", O_WRONLY);  // where memory runs out, this process goes first
    if (score >= 0) {
        if (write(score, "1000", 4) < 0) {}
        close(score);
    }
    setvbuf(stdout, nullptr, _IOLBF, 1 << 16);  // what was printed before a crash is to be seen
    if (pipe2(events, O_CLOEXEC)) return 1;
    enter_thread();
    const char* kind = fiber_kind();
    send_frame("hello", kind, strlen(kind));
    for (;;) {
        int file = -1;
        const std::string text = receive_frame(&file);
        if (file < 0) describe(text);
        else serve_call(text, file);
    }
}

}  // namespace simt
