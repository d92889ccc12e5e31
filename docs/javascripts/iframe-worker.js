// Browsers start no worker from the disk, and the search needs one: there it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.ready = new Promise(resolve => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow
          const run = source => new Promise(done => {
            const script = inside.document.createElement("script")
            script.src = source
            script.addEventListener("load", done)
            inside.document.head.append(script)
          })
          inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => run(source)), Promise.resolve())
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          run(address).then(() => resolve(inside))
        }, { once: true })
      })
      document.head.append(frame)
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}
