/* Browsers start no workers from file://. There, run the search's script in a hidden frame that looks like one. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.answer = data => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const page = inside.document;
      page.open();
      page.write(
        "<script>parentAnswer = window.answer; window.postMessage = parentAnswer;" +
        "function importScripts() { return Promise.resolve(); }</" + "script>" +
        "<script src='" + url + "'></" + "script>");
      page.close();
      this.frame.addEventListener("load", () => this.flush());
    }
    postMessage(data) {
      this.waiting.push(data);
      if (this.ready) this.flush();
    }
    flush() {
      this.ready = true;
      for (const data of this.waiting.splice(0))
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() { this.frame.remove(); }
  };
}
