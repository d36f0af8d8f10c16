// A server of the Model Context Protocol over streamable HTTP: its tools, and calls of them. It must
// allow pages of this origin (CORS), and weft must be started with its origin (--page-mcp-origins).
// Source: modelcontextprotocol.io, specification 2025-06-18, transports and lifecycle.

import { events } from "../feed.js";

const VERSION = "2025-06-18";
const MOST_PAGES = 20; // of a list of tools
const SESSION = "mcp-session-id";
const NO_METHOD = -32601;

export class McpServer {
	tools = [];
	#id = 0;
	#session = "";
	#version = "";

	constructor(url, key = "") {
		this.url = url;
		this.key = key;
	}

	async open() {
		await this.#begin();
		this.tools = [];
		let cursor;
		for (let i = 0; i < MOST_PAGES; i++) {
			const { tools, nextCursor } = await this.#ask("tools/list", cursor ? { cursor } : {});
			this.tools.push(...tools);
			cursor = nextCursor;
			if (!cursor) break;
		}
	}

	// The result of a call as a text. Aborted by `signal`, the server is told.
	async call(name, args, signal) {
		const ask = () => this.#ask("tools/call", { name, arguments: args }, signal);
		let result;
		try {
			result = await ask();
		} catch (error) {
			if (!error.isSessionOver) throw error;
			// A server that was started again knows no session of before.
			await this.#begin();
			result = await ask();
		}
		const { content = [], structuredContent, isError } = result;
		const words = content.map((part) => part.text ?? part.resource?.text ?? `[${part.type}]`).join("\n") || JSON.stringify(structuredContent ?? null);
		return isError ? "error: " + words : words;
	}

	close() {
		if (this.#session) fetch(this.url, { method: "DELETE", headers: this.#headers() }).catch(() => {});
		this.#session = "";
	}

	async #begin() {
		this.#session = "";
		this.#version = "";
		const { protocolVersion } = await this.#ask("initialize", { protocolVersion: VERSION, capabilities: {}, clientInfo: { name: "weft", version: "1" } });
		this.#version = protocolVersion;
		await this.#post({ method: "notifications/initialized" });
	}

	async #ask(method, params, signal) {
		const id = ++this.#id;
		try {
			const answer = await this.#post({ id, method, params }, signal);
			const { result, error } = await this.#reply(answer, id);
			if (error) throw new Error(`${this.url}: ${error.message}`);
			return result;
		} catch (error) {
			if (!signal?.aborted) throw error;
			this.#post({ method: "notifications/cancelled", params: { requestId: id, reason: "the user has ended the call" } }).catch(() => {});
			throw new Error(`${this.url}: the call was ended by the user`);
		}
	}

	#headers() {
		const headers = { "content-type": "application/json", accept: "application/json, text/event-stream" };
		if (this.#session) headers[SESSION] = this.#session;
		if (this.#version) headers["mcp-protocol-version"] = this.#version;
		if (this.key) headers.authorization = "Bearer " + this.key;
		return headers;
	}

	async #post(message, signal) {
		let answer;
		try {
			answer = await fetch(this.url, { method: "POST", headers: this.#headers(), body: JSON.stringify({ jsonrpc: "2.0", ...message }), signal });
		} catch {
			throw new Error(`${this.url} cannot be reached, or does not allow this page`);
		}
		if (!answer.ok) throw this.#refusal(answer.status);
		this.#session = answer.headers.get(SESSION) || this.#session;
		return answer;
	}

	#refusal(status) {
		const words = { 401: "it needs a key", 403: "it allows neither this page nor this key" };
		if (this.#version && !this.#session) words[400] = `if it has sessions, it must let this page see its header ${SESSION}`;
		const error = new Error([`${this.url} answered ${status}`, words[status]].filter(Boolean).join(": "));
		error.isSessionOver = status === 404 && this.#session !== "";
		return error;
	}

	async #reply(answer, id) {
		try {
			if (!answer.headers.get("content-type")?.startsWith("text/event-stream")) return await answer.json();
			for await (const [, data] of events(answer)) {
				if (!data) continue; // only to be able to begin again from there
				const message = JSON.parse(data);
				if (message.method) this.#serve(message);
				else if (message.id === id) return message;
			}
		} catch (error) {
			if (error instanceof SyntaxError) throw new Error(`${this.url} answered what is no JSON`);
			throw new Error(`${this.url} has ended in the midst of an answer`);
		}
		throw new Error(`${this.url} has ended its answer without a result`);
	}

	// A server may ask, too: whether the page is there, and nothing else.
	#serve({ id, method }) {
		if (id === undefined) return;
		const answer = method === "ping" ? { result: {} } : { error: { code: NO_METHOD, message: "this client does not offer " + method } };
		this.#post({ id, ...answer }).catch(() => {});
	}
}
