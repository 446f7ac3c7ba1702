// The process in which a module runs: loads the library, and hands over to it (serve.cpp).
//
//   runner LIBRARY SOCKET PARENT      exit status 3: the library cannot be loaded, and stderr says why
//
// The runtime's own library is there already, beside this file, when the module asks for it.
// It ends with PARENT, whatever the library does: in a constructor of a global variable, which runs as the library is
// loaded, in its host part, in a kernel. (PR_SET_PDEATHSIG would follow the thread that has started it.)
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern "C" int simt_serve(void* library, int socket);
static int python;
static pid_t parent;

static void* end_with_parent(void*) {
    for (bool open = true; getppid() == parent;) {
        pollfd socket = {open ? python : -1, POLLRDHUP, 0};
        poll(&socket, 1, 1000);
        if (socket.revents & (POLLRDHUP | POLLHUP)) break;
        open = open && !(socket.revents & POLLNVAL);  // the library may have closed it
    }
    kill(getpgrp() == getpid() ? 0 : getpid(), SIGKILL);  // with all that it has started
    return nullptr;
}

int main(int count, char** words) {
    if (count != 4) return 2;
    python = atoi(words[2]), parent = atoi(words[3]);
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    pthread_t thread;
    if (pthread_create(&thread, nullptr, end_with_parent, nullptr)) return 4;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    void* library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    return simt_serve(library, python);
}
