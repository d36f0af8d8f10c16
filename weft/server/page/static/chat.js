// A conversation with the model, streamed: the OpenAI API as every client uses it.

import { $, button, copy, el, headers, keepKey, keyOf, reason } from "./parts.js";
import { events } from "./feed.js";
import { nodes } from "./markdown.js";
import { asCurl, asPython } from "./story.js";

const MAX_PICTURE = 8e6; // bytes

export class Chat {
	constructor({ open, mine, story }) {
		this.open = open; // shows the story of a request
		this.mine = mine; // is told the name of each request
		this.story = story;
		this.model = "";
		this.messages = [];
		this.pictures = [];
		this.stopper = null;
		$("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
		$("text").addEventListener("keydown", (event) => {
			if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
		});
		$("text").addEventListener("input", () => this.grow());
		$("text").addEventListener("paste", (event) => this.take(event.clipboardData?.files || []));
		$("log").addEventListener("dragover", (event) => event.preventDefault());
		$("log").addEventListener("drop", (event) => { event.preventDefault(); this.take(event.dataTransfer.files); });
		$("picture").addEventListener("change", () => { this.take($("picture").files); $("picture").value = ""; });
		$("stop").addEventListener("click", () => this.stop());
		$("chat-new").addEventListener("click", () => this.clear());
		$("chat-more").addEventListener("click", () => this.settings());
		$("user-key").value = keyOf("user");
		$("user-key").addEventListener("change", () => keepKey("user", $("user-key").value.trim()));
		this.clear();
	}

	facts(hello) {
		this.model = hello.model;
		this.takesPictures = (hello.takes || []).includes("image");
		$("picture-label").hidden = !this.takesPictures;
		$("text").disabled = hello.has_chat === false;
		$("send").disabled = hello.has_chat === false;
		$("text").placeholder = hello.has_chat === false ? "This model has no chat" : "Ask " + hello.model;
	}

	clear() {
		this.stop();
		this.messages = [];
		$("log").replaceChildren(el("p", "none", "Ask something, and see what the engine makes of it: your request is the bold one among those that run."));
	}

	settings() {
		const isOpen = $("settings").hidden;
		$("settings").hidden = !isOpen;
		$("chat-more").setAttribute("aria-expanded", String(isOpen));
	}

	grow() {
		const box = $("text");
		box.style.setProperty("height", "auto");
		box.style.setProperty("height", Math.min(box.scrollHeight + 2, 144) + "px");
	}

	async take(files) {
		if (!this.takesPictures) return;
		for (const file of files) {
			if (!file.type.startsWith("image/")) continue;
			if (file.size > MAX_PICTURE) {
				this.complain(`${file.name} has ${(file.size / 1e6).toFixed(1)} MB; at most ${MAX_PICTURE / 1e6} are sent from here`);
				continue;
			}
			const url = await new Promise((done) => {
				const reader = new FileReader();
				reader.addEventListener("load", () => done(reader.result));
				reader.readAsDataURL(file);
			});
			this.pictures.push(url);
		}
		this.shots($("shots"), this.pictures);
		$("shots").hidden = !this.pictures.length;
	}

	shots(into, urls) {
		into.replaceChildren(...urls.map((url) => {
			const shot = el("img");
			shot.src = url;
			shot.alt = "picture to send";
			return shot;
		}));
	}

	stop() {
		this.stopper?.abort();
	}

	complain(words) {
		const box = el("div", "it bad");
		box.append(el("p", "err", words));
		$("log").append(box);
		this.follow();
	}

	follow() {
		const log = $("log");
		log.scrollTop = log.scrollHeight;
	}

	// ---- one turn

	body() {
		const body = { model: this.model || undefined, messages: [], stream: true, max_tokens: 256, stream_options: { include_usage: true } };
		const system = $("system").value.trim();
		if (system) body.messages.push({ role: "system", content: system });
		body.messages.push(...this.messages);
		if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
		if ($("max-tokens").value !== "") body.max_tokens = Number($("max-tokens").value);
		const schema = $("schema").value.trim();
		$("schema").classList.remove("wrong");
		if (schema) {
			body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
		}
		return body;
	}

	async send() {
		const text = $("text").value.trim();
		if ((!text && !this.pictures.length) || this.stopper) return;
		let content = text;
		if (this.pictures.length) {
			content = this.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
			if (text) content.push({ type: "text", text });
		}
		this.messages.push({ role: "user", content });
		let body;
		try {
			body = this.body();
		} catch (error) {
			this.messages.pop();
			$("schema").classList.add("wrong");
			this.complain("the JSON schema is not JSON: " + error.message);
			return;
		}
		$("log").querySelector(".none")?.remove();
		const me = el("div", "me");
		if (this.pictures.length) {
			const shots = el("div");
			this.shots(shots, this.pictures);
			me.append(shots);
		}
		me.append(text);
		const turn = { box: el("div", "it busy"), text: "", thought: "", began: performance.now(), first: 0, usage: null };
		$("log").append(me, turn.box);
		$("text").value = "";
		this.pictures = [];
		$("shots").hidden = true;
		this.grow();
		await this.run(body, turn);
	}

	async run(body, turn) {
		turn.rid = "page-" + [...crypto.getRandomValues(new Uint8Array(9))].map((one) => one.toString(36).padStart(2, "0")).join("").slice(0, 14);
		this.mine(turn.rid);
		this.story.asked.set(turn.rid, body);
		this.stopper = new AbortController();
		$("stop").hidden = false;
		$("send").hidden = true;
		let failed = "";
		try {
			const answer = await fetch("v1/chat/completions", {
				method: "POST", signal: this.stopper.signal, body: JSON.stringify(body),
				headers: { "content-type": "application/json", "x-request-id": turn.rid, ...headers("user") },
			});
			if (!answer.ok) throw new Error(await reason(answer));
			for await (const [, data] of events(answer)) {
				if (data === "[DONE]") break;
				this.piece(turn, JSON.parse(data));
			}
		} catch (error) {
			failed = error.name === "AbortError" ? "stopped" : error.message;
		}
		this.stopper = null;
		$("stop").hidden = true;
		$("send").hidden = false;
		this.finish(turn, body, failed);
		$("text").focus({ preventScroll: true });
	}

	piece(turn, chunk) {
		if (chunk.error) throw new Error(chunk.error.message);
		if (chunk.usage) turn.usage = chunk.usage;
		const delta = chunk.choices?.[0]?.delta;
		if (!delta) return;
		const thought = delta.reasoning_content || delta.reasoning || "";
		if ((delta.content || thought) && !turn.first) turn.first = performance.now();
		turn.thought += thought;
		turn.text += delta.content || "";
		if (!turn.frame) turn.frame = requestAnimationFrame(() => { turn.frame = 0; this.draw(turn); });
	}

	draw(turn) {
		const log = $("log");
		const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
		const wasOpen = turn.box.querySelector("details")?.open;
		const made = [];
		if (turn.thought) {
			const fold = el("details");
			fold.open = wasOpen ?? false;
			fold.append(el("summary", "", turn.text ? "Reasoning" : "Reasoning…"), el("p", "", turn.thought));
			made.push(fold);
		}
		made.push(...nodes(turn.text));
		turn.box.replaceChildren(...made);
		if (isAtEnd) this.follow();
	}

	finish(turn, body, failed) {
		cancelAnimationFrame(turn.frame);
		this.draw(turn);
		turn.box.classList.remove("busy");
		if (failed && failed !== "stopped") {
			turn.box.classList.add("bad");
			turn.box.append(el("p", "err", failed));
		}
		if (turn.text) this.messages.push({ role: "assistant", content: turn.text });
		else this.messages.pop();
		const after = el("div", "after");
		after.append(el("span", "", this.said(turn, failed)));
		after.append(button("Story", () => this.open(turn.rid)));
		for (const [name, make] of [["curl", asCurl], ["Python", asPython]]) {
			const one = button(name, () => copy(make(body), one));
			one.setAttribute("aria-label", "Copy as " + name);
			after.append(one);
		}
		turn.box.append(after);
		this.follow();
	}

	said(turn, failed) {
		const words = [];
		if (failed === "stopped") words.push("stopped");
		const took = (performance.now() - turn.first) / 1000;
		if (turn.usage) {
			words.push(`${turn.usage.completion_tokens} tokens`);
			const cached = turn.usage.prompt_tokens_details?.cached_tokens;
			if (cached) words.push(`${cached} of ${turn.usage.prompt_tokens} cached`);
			if (turn.first && took > 0.05) words.push(`${(turn.usage.completion_tokens / took).toFixed(0)} tokens/s`);
		}
		if (turn.first) words.push(`first after ${(turn.first - turn.began).toFixed(0)} ms`);
		return words.join(" · ");
	}
}
